"""Spans on their way to a collector: in batches, by a thread of OpenTelemetry's SDK.

What the SDK reads from the environment (`OTEL_…`: service name, sampler, headers, batches) holds.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import structlog
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
    OTLPSpanExporter as GrpcExporter,
)
from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
    OTLPSpanExporter as HttpExporter,
)
from opentelemetry.sdk.environment_variables import (
    OTEL_EXPORTER_OTLP_PROTOCOL,
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
)
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from ec_store.threads import DaemonPool
from epd.observe.otel import OtelTracer
from epd.spans import Tracer
from epd.version import __version__

SERVICE = "epd-proxy"
"""`service.name` where `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` do not say."""
PROTOCOLS = {"grpc": GrpcExporter, "http/protobuf": HttpExporter}
"""Exporters by `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL`; the first is the default, as vLLM's."""
FLUSH_S = 3.0
"""At the end: for the collector to take what is left."""
GIVE_UP_S = 1.0
"""After it, for the exporter to see that it is over."""


def protocol() -> str:
    """The protocol that the environment names.

    Raises:
        ValueError: it is none that can be spoken.
    """
    for variable in (OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, OTEL_EXPORTER_OTLP_PROTOCOL):
        if named := os.environ.get(variable):
            if named not in PROTOCOLS:
                raise ValueError(f"{variable} must be {' or '.join(PROTOCOLS)}, not {named!r}")
            return named
    return next(iter(PROTOCOLS))


@asynccontextmanager
async def exporting(endpoint: str) -> AsyncIterator[Tracer | None]:
    """Makes spans for a collector, which has those that are left when the context is left.

    Args:
        endpoint: the collector's URL: `http://host:4317` for gRPC, and for HTTP the whole of it,
            such as `http://host:4318/v1/traces`.

    Yields:
        None where `OTEL_SDK_DISABLED` says so.
    """
    provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
    tracer = provider.get_tracer("epd", __version__)
    if isinstance(tracer, trace.NoOpTracer):
        yield None
        return
    exporter = Reporting(PROTOCOLS[protocol()](endpoint=endpoint), endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield OtelTracer(tracer)
    finally:
        await _flush(provider, exporter)


def _resource() -> Resource:
    """Who sends the spans."""
    said = Resource.create()
    ours: dict[str, str] = {SERVICE_VERSION: __version__}
    if str(said.attributes[SERVICE_NAME]).startswith("unknown_service"):  # the SDK's own default
        ours[SERVICE_NAME] = SERVICE
    return said.merge(Resource(ours))


async def _flush(provider: TracerProvider, exporter: SpanExporter) -> None:
    """Export what is left, for no longer than there is time."""
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
    """An exporter that says once that a collector is away, and once that it is back.

    The library has several lines for each batch. It says what is wrong in its log alone, so that is
    listened to.
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
            self._report()
        return result

    def _report(self) -> None:
        log = structlog.get_logger("epd")
        if self._away:
            log.warning("spans are lost", endpoint=self._endpoint, reason=self._heard.line)
        else:
            log.info("spans are exported again", endpoint=self._endpoint)

    def shutdown(self) -> None:
        """Try nothing any more; what is under way is given up."""
        if self._over:
            return
        self._over = True
        self._exporter.shutdown()
        self._logger.removeHandler(self._heard)
        self._logger.propagate = True


class _LastLine(logging.Handler):
    """Remembers what was logged last."""

    line = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.line = record.getMessage()
