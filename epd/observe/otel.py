"""Export of traces with OpenTelemetry's SDK, an optional dependency.

A thread of OpenTelemetry's SDK exports spans in batches. The SDK's environment variables (`OTEL_…`:
service name, sampler, headers, batches) apply.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import structlog
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.environment_variables import (
    OTEL_EXPORTER_OTLP_PROTOCOL,
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
)
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from ec_store.concurrency import DaemonPool
from epd.spans import RequestSpan, Tracer
from epd.version import __version__

SERVICE = "epd-proxy"
"""Default of `service.name`: used without `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES`."""
PROTOCOLS = {"grpc": GrpcExporter, "http/protobuf": HttpExporter}
"""Exporters by `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL`; the first is the default, as in vLLM."""
FLUSH_S = 3.0
"""Time limit at shutdown for exporting the remaining spans, in seconds."""
GIVE_UP_S = 1.0
"""Time limit for the exporter to stop after `FLUSH_S`, in seconds."""


def protocol() -> str:
    """Return the protocol that the environment names.

    Raises:
        ValueError: the environment names an unsupported protocol.
    """
    for variable in (OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, OTEL_EXPORTER_OTLP_PROTOCOL):
        if name := os.environ.get(variable):
            if name not in PROTOCOLS:
                raise ValueError(f"{variable} must be {' or '.join(PROTOCOLS)}, not {name!r}")
            return name
    return next(iter(PROTOCOLS))


@asynccontextmanager
async def exporting(endpoint: str) -> AsyncIterator[Tracer | None]:
    """Export spans to a collector until the context is left, which flushes the remaining ones.

    Args:
        endpoint: URL of the collector: `http://host:4317` for gRPC, and for HTTP the complete URL,
            such as `http://host:4318/v1/traces`.

    Yields:
        The tracer, or None if `OTEL_SDK_DISABLED` is set.
    """
    provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
    tracer = provider.get_tracer("epd", __version__)
    if isinstance(tracer, trace.NoOpTracer):
        yield None
        return
    exporter = Reporting(PROTOCOLS[protocol()](endpoint=endpoint), endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield partial(RequestSpan, tracer)
    finally:
        await _flush(provider, exporter)


def _resource() -> Resource:
    resource = Resource.create()
    attributes: dict[str, str] = {SERVICE_VERSION: __version__}
    # The SDK's own default.
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        attributes[SERVICE_NAME] = SERVICE
    return resource.merge(Resource(attributes))


async def _flush(provider: TracerProvider, exporter: SpanExporter) -> None:
    pool = DaemonPool(1, "traces")
    ending = asyncio.wrap_future(pool.submit(provider.shutdown))
    try:
        done, _ = await asyncio.wait([ending], timeout=FLUSH_S)
        if not done:
            exporter.shutdown()
            await asyncio.wait([ending], timeout=GIVE_UP_S)
    finally:
        ending.cancel()
        pool.close()


class Reporting(SpanExporter):
    """Exporter that logs once that the collector is unreachable, and once that it is back.

    The library logs several lines for each batch. Its log is the only place that has the reason of
    a failure; therefore this class listens to that log.
    """

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._heard = _LastLine(logging.ERROR)
        self._logger = logging.getLogger("opentelemetry.exporter")
        self._logger.addHandler(self._heard)
        self._logger.propagate = False
        self._away = False
        self._over = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export a batch, on the SDK's thread."""
        result = self._exporter.export(spans)
        away = result is not SpanExportResult.SUCCESS
        if away != self._away:
            self._away = away
            log = structlog.get_logger("epd")
            if away:
                log.warning("spans are lost", endpoint=self._endpoint, reason=self._heard.line)
            else:
                log.info("spans are exported again", endpoint=self._endpoint)
        return result

    def shutdown(self) -> None:
        """Stop, and abandon an export under way."""
        if self._over:
            return
        self._over = True
        self._exporter.shutdown()
        self._logger.removeHandler(self._heard)
        self._logger.propagate = True


class _LastLine(logging.Handler):
    line = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.line = record.getMessage()
