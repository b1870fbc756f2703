"""Spans by OpenTelemetry.

Attributes are those of the semantic conventions for HTTP and generative AI; our own are `epd.…`.
No prompts, media, keys or tenants; URLs are those of instances and of routes.
"""

from collections.abc import Mapping
from functools import lru_cache
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from epd.errors import slug_of
from epd.events import RequestRecord
from epd.spans import Item, Span

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
