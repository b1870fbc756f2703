"""Interfaces for tracing a request; `epd.observe.otel` implements them.

Code that works for a request receives its `RequestSpan`, or None without tracing. With None, no
tracing code is called.
"""

from collections.abc import Mapping
from typing import Protocol, Self

from epd.events import RequestRecord


class SpanItem(Protocol):
    """A media item of a request, with the attributes that its spans need."""

    @property
    def param_path(self) -> str:
        """Position of the item in the request."""

    @property
    def modality(self) -> str:
        """`image`, `audio` or `video`."""


class Span(Protocol):
    """A span of time within a request: a context manager that ends the span at its exit."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers for the instance, so that its spans become children of this one."""

    def record_status(self, status: int) -> None:
        """Record the HTTP status of an instance's answer."""

    def event(self, name: str) -> None:
        """Record an event at the current time."""

    def link(self, other: "Span") -> None:
        """Link a related span, possibly of another request."""

    def end_span(self, error: str | None = None) -> None:
        """End the span, with the slug of the error if there is one. A second call has no effect."""

    def __enter__(self) -> Self:
        """Return the span, which has started already."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the span, with the slug of the exception if there is one."""


class RequestSpan(Protocol):
    """The root span of a client's request, from its head to its end."""

    @property
    def trace_id(self) -> str:
        """Trace id in hexadecimal."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers for an instance, as `Span.headers`."""

    def record_request(self, operation: str | None, model: str | None) -> None:
        """Record the operation and the model that the client asks for, as far as known."""

    def child(self, name: str, *, url: str | None = None, item: SpanItem | None = None) -> Span:
        """Start a child span of an operation: a request to the instance at `url`, work on `item`.

        The names of operations are a small fixed set.
        """

    def latest_child(self, name: str, item: SpanItem) -> Span | None:
        """Return the latest child of this name for an item, or None."""

    def end_request(self, event: RequestRecord) -> None:
        """End the span and record the request's outcome."""


class Tracer(Protocol):
    """Creates the root span of each request."""

    def request(self, method: str, route: str, headers: Mapping[str, str]) -> RequestSpan:
        """Start the span of a request to the declared path of a route.

        `headers` are the client's `traceparent` and `tracestate`, as far as it sent them.
        """
