"""Traces with OpenTelemetry: spans of requests, and their export.

OpenTelemetry is an optional dependency; this module is imported only if traces are configured.

Attributes follow the semantic conventions for HTTP and generative AI; the proxy's own begin with
`epd.`. They contain no prompts, media, keys or tenants. URLs are those of instances and of routes.

A thread of OpenTelemetry's SDK exports spans in batches. The SDK's environment variables (`OTEL_…`:
service name, sampler, headers, batches) apply.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Self
from urllib.parse import urlsplit

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.environment_variables import (
    OTEL_EXPORTER_OTLP_PROTOCOL,
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
)
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ec_store.concurrency import DaemonPool
from epd.errors import slug_of
from epd.events import RequestRecord
from epd.spans import Span, SpanItem, Tracer
from epd.version import __version__

MAX_MODEL = 128
"""Upper bound of a model's name in an attribute, in characters."""

W3C = TraceContextTextMapPropagator()


class OtelTracer:
    """Tracer that starts a span for each request. Child spans share its trace."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    def request(self, method: str, route: str, headers: Mapping[str, str]) -> "OtelRequest":
        """See `Tracer.request`. An invalid `traceparent` starts a new trace."""
        span = self._tracer.start_span(
            f"{method} {route}",
            W3C.extract(headers, Context()) if headers else Context(),
            SpanKind.SERVER,
            {"http.request.method": method, "http.route": route},
        )
        return OtelRequest(self._tracer, span)


class OtelSpan:
    """Span of the SDK, as `Span`."""

    __slots__ = ("_ended", "_span", "headers")

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self._ended = False
        self.headers: dict[str, str] = {}
        W3C.inject(self.headers, trace.set_span_in_context(span, Context()))

    def record_status(self, status: int) -> None:
        self._span.set_attribute("http.response.status_code", status)

    def event(self, name: str) -> None:
        self._span.add_event(name)

    def link(self, other: Span) -> None:
        if isinstance(other, OtelSpan):
            self._span.add_link(other._span.get_span_context())  # noqa: SLF001 - an object of this class

    def end_span(self, error: str | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end_span(slug_of(error))


class OtelRequest:
    """Span of a request, with its children."""

    __slots__ = ("_children", "_context", "_span", "_tracer", "headers", "trace_id")

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        self._context = trace.set_span_in_context(span, Context())
        self._children: dict[tuple[str, str | None], tuple[int, OtelSpan]] = {}
        self.trace_id = trace.format_trace_id(span.get_span_context().trace_id)
        self.headers: dict[str, str] = {}
        W3C.inject(self.headers, self._context)

    def record_request(self, operation: str | None, model: str | None) -> None:
        if operation is not None:
            self._span.set_attribute("gen_ai.operation.name", operation)
        if model:
            self._span.set_attribute("gen_ai.request.model", model[:MAX_MODEL])

    def child(self, name: str, *, url: str | None = None, item: SpanItem | None = None) -> OtelSpan:
        kind, attributes = SpanKind.INTERNAL, dict[str, str | int]()
        if item is not None:
            attributes |= {"epd.item": item.param_path, "epd.item.modality": item.modality}
        key = name, None if item is None else item.param_path
        again = self._children[key][0] + 1 if key in self._children else 0
        if url is not None:
            kind = SpanKind.CLIENT
            attributes |= _peer(url)
            if again:
                attributes["http.request.resend_count"] = again
        child = OtelSpan(self._tracer.start_span(name, self._context, kind, attributes))
        self._children[key] = again, child
        return child

    def latest_child(self, name: str, item: SpanItem) -> Span | None:
        found = self._children.get((name, item.param_path))
        return None if found is None else found[1]

    def end_request(self, event: RequestRecord) -> None:
        """See `RequestSpan.end_request`.

        The span's status is an error unless the response is a 4xx.
        """
        attributes: dict[str, int | str | list[str]] = {
            "http.response.status_code": event.status,
            "epd.request.id": event.engine_id,
            "epd.retries": event.retries,
            **{f"epd.items.{result}": count for result, count in event.items.items()},
        }
        if event.policy is not None:
            attributes["epd.policy"] = event.policy
        if event.degraded:
            attributes["epd.degraded"] = sorted(event.degraded)
        if event.error is not None:
            attributes["error.type"] = event.error
            if not 400 <= event.status < 500:  # noqa: PLR2004
                self._span.set_status(Status(StatusCode.ERROR))
        self._span.set_attributes(attributes)
        self._span.end()


@lru_cache(maxsize=1024)
def _peer(url: str) -> Mapping[str, str | int]:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return {
        "http.request.method": "POST",
        "url.full": url,
        "server.address": parts.hostname or "",
        "server.port": port,
    }


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
        if named := os.environ.get(variable):
            if named not in PROTOCOLS:
                raise ValueError(f"{variable} must be {' or '.join(PROTOCOLS)}, not {named!r}")
            return named
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
        yield OtelTracer(tracer)
    finally:
        await _flush(provider, exporter)


def _resource() -> Resource:
    resource = Resource.create()
    ours: dict[str, str] = {SERVICE_VERSION: __version__}
    # The SDK's own default.
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        ours[SERVICE_NAME] = SERVICE
    return resource.merge(Resource(ours))


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
    """Handler that keeps the last record."""

    line = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.line = record.getMessage()
