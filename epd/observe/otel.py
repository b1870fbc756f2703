"""Spans by OpenTelemetry.

Attributes are those of the semantic conventions for HTTP and generative AI; our own are `epd.…`.
No prompts, media, keys or tenants; URLs are those of instances and of routes.

Spans on their way to a collector: in batches, by a thread of OpenTelemetry's SDK.

What the SDK reads from the environment (`OTEL_…`: service name, sampler, headers, batches) holds.

Traces, where they are wanted: OpenTelemetry is an extra, imported only then.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import lru_cache
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
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
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ec_store.concurrency import DaemonPool
from epd.config.sections.serving import ServingSettings
from epd.errors import slug_of
from epd.events import RequestRecord
from epd.spans import Item, Span, Tracer
from epd.version import __version__

MAX_MODEL = 128
"""Characters of a model's name."""
SERVER_ERROR = 500

W3C = TraceContextTextMapPropagator()


class OtelTracer:
    """Makes a span for each request; its children share its trace."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    def request(self, method: str, route: str, headers: Mapping[str, str]) -> "OtelRequest":
        """As `Tracer.request`. What is no `traceparent` begins a trace of its own."""
        span = self._tracer.start_span(
            f"{method} {route}",
            W3C.extract(headers, Context()) if headers else Context(),
            SpanKind.SERVER,
            {"http.request.method": method, "http.route": route},
        )
        return OtelRequest(self._tracer, span)


class OtelSpan:
    """One span."""

    __slots__ = ("_ended", "_span", "headers")

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self._ended = False
        self.headers: dict[str, str] = {}
        W3C.inject(self.headers, trace.set_span_in_context(span, Context()))

    def answered(self, status: int) -> None:
        """As `Span.answered`."""
        self._span.set_attribute("http.response.status_code", status)

    def event(self, name: str) -> None:
        """As `Span.event`."""
        self._span.add_event(name)

    def link(self, other: Span) -> None:
        """As `Span.link`."""
        if isinstance(other, OtelSpan):
            self._span.add_link(other._span.get_span_context())  # noqa: SLF001 - one of us

    def end(self, error: str | None = None) -> None:
        """As `Span.end`."""
        if self._ended:
            return
        self._ended = True
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()

    def __enter__(self) -> Self:
        """It goes on."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """It is over."""
        self.end(slug_of(error))


class OtelRequest:
    """The span of a request, and its children."""

    __slots__ = ("_children", "_context", "_span", "_tracer", "headers", "trace_id")

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        self._context = trace.set_span_in_context(span, Context())
        self._children: dict[tuple[str, str | None], tuple[int, OtelSpan]] = {}
        self.trace_id = trace.format_trace_id(span.get_span_context().trace_id)
        self.headers: dict[str, str] = {}
        W3C.inject(self.headers, self._context)

    def asks(self, operation: str | None, model: str | None) -> None:
        """As `RequestSpan.asks`."""
        if operation is not None:
            self._span.set_attribute("gen_ai.operation.name", operation)
        if model:
            self._span.set_attribute("gen_ai.request.model", model[:MAX_MODEL])

    def child(self, name: str, *, url: str | None = None, item: Item | None = None) -> OtelSpan:
        """As `RequestSpan.child`."""
        kind, attributes = SpanKind.INTERNAL, dict[str, str | int]()
        if item is not None:
            attributes |= {"epd.item": item.param, "epd.item.modality": item.modality}
        key = name, None if item is None else item.param
        again = self._children[key][0] + 1 if key in self._children else 0
        if url is not None:
            kind = SpanKind.CLIENT
            attributes |= _peer(url)
            if again:
                attributes["http.request.resend_count"] = again
        child = OtelSpan(self._tracer.start_span(name, self._context, kind, attributes))
        self._children[key] = again, child
        return child

    def sent(self, name: str, item: Item) -> Span | None:
        """As `RequestSpan.sent`."""
        found = self._children.get((name, item.param))
        return None if found is None else found[1]

    def done(self, event: RequestRecord) -> None:
        """As `RequestSpan.done`: an error is the proxy's where it is no 4xx."""
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
            if not SERVER_ERROR > event.status >= 400:  # noqa: PLR2004
                self._span.set_status(Status(StatusCode.ERROR))
        self._span.set_attributes(attributes)
        self._span.end()


@lru_cache(maxsize=1024)
def _peer(url: str) -> Mapping[str, str | int]:
    """What a span says of the instance that is asked."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return {
        "http.request.method": "POST",
        "url.full": url,
        "server.address": parts.hostname or "",
        "server.port": port,
    }


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


class TracesUnavailable(Exception):
    """Traces are wanted and cannot be had; its text says why."""


def check_tracing(config: ServingSettings) -> None:
    """Find out at the start.

    Raises:
        TracesUnavailable: OpenTelemetry is missing, or its own settings are wrong.
    """
    if config.otlp_traces_endpoint is None:
        return
    try:
        pass
    except ImportError as error:
        raise TracesUnavailable(
            f"--otlp-traces-endpoint needs pip install 'epd-proxy[otel]': {error}"
        ) from error
    try:
        protocol()
    except ValueError as error:
        raise TracesUnavailable(str(error)) from error


def tracing(config: ServingSettings) -> AbstractAsyncContextManager[Tracer | None]:
    """Makes spans, which are exported until the context is left; None where none are wanted.

    Raises:
        TracesUnavailable: they cannot be had.
    """
    if config.otlp_traces_endpoint is None:
        return nullcontext()
    check_tracing(config)

    return exporting(config.otlp_traces_endpoint)
