"""Spans of a request, with OpenTelemetry's API.

OpenTelemetry is an optional dependency: this module is imported only if traces are configured. Code
that works for a request receives its `RequestSpan`, or None without tracing. With None, no tracing
code is called.

Attributes follow the semantic conventions for HTTP and generative AI; the proxy's own begin with
`epd.`. They contain no prompts, media, keys or tenants. URLs are those of instances and of routes.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Self
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from epd.api.items import MMItem
from epd.errors import slug_of
from epd.events import RequestRecord

MAX_MODEL = 128
"""Upper bound of a model's name in an attribute, in characters."""

W3C = TraceContextTextMapPropagator()


class Span:
    """A span of time within a request: a context manager that ends the span at its exit.

    Attributes:
        headers: headers for the instance, so that its spans become children of this one.
    """

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

    def link(self, other: "Span") -> None:
        """Link a related span, possibly of another request."""
        self._span.add_link(other._span.get_span_context())  # noqa: SLF001 - an object of this class

    def end_span(self, error: str | None = None) -> None:
        """End the span, with the slug of the error if there is one. A second call has no effect."""
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


class RequestSpan:
    """The root span of a client's request. Child spans share its trace."""

    __slots__ = ("_children", "_context", "_span", "_tracer", "headers", "trace_id")

    def __init__(
        self, tracer: trace.Tracer, method: str, route: str, headers: Mapping[str, str]
    ) -> None:
        """Start the span of a request to the declared path of a route.

        `headers` are the client's `traceparent` and `tracestate`, as far as it sent them. An
        invalid `traceparent` starts a new trace.
        """
        self._tracer = tracer
        self._span = tracer.start_span(
            f"{method} {route}",
            W3C.extract(headers, Context()) if headers else Context(),
            SpanKind.SERVER,
            {"http.request.method": method, "http.route": route},
        )
        self._context = trace.set_span_in_context(self._span, Context())
        self._children: dict[tuple[str, str | None], tuple[int, Span]] = {}
        self.trace_id = trace.format_trace_id(self._span.get_span_context().trace_id)
        self.headers: dict[str, str] = {}
        W3C.inject(self.headers, self._context)

    def record_request(self, operation: str | None, model: str | None) -> None:
        if operation is not None:
            self._span.set_attribute("gen_ai.operation.name", operation)
        if model:
            self._span.set_attribute("gen_ai.request.model", model[:MAX_MODEL])

    def child(self, name: str, *, url: str | None = None, item: MMItem | None = None) -> Span:
        """Start a child span of an operation: a request to the instance at `url`, work on `item`.

        The names of operations are a small fixed set.
        """
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
        child = Span(self._tracer.start_span(name, self._context, kind, attributes))
        self._children[key] = again, child
        return child

    def latest_child(self, name: str, item: MMItem) -> Span | None:
        found = self._children.get((name, item.param_path))
        return None if found is None else found[1]

    def end_request(self, event: RequestRecord) -> None:
        """End the span and record the request's outcome: an error unless the response is a 4xx."""
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


Tracer = Callable[[str, str, Mapping[str, str]], RequestSpan]
"""Starts the span of a request, of its method, its route and its headers."""


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
