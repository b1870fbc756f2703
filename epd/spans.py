"""What a traced request is followed by; `epd.observe.otel` makes it.

Who works for a request has its `RequestSpan`, or None where nothing is traced: nothing else is
asked then, and nothing called.
"""

from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, Self

from epd.events import RequestRecord


class Item(Protocol):
    """A media item of a request, as far as its spans name it."""

    @property
    def param(self) -> str:
        """Where it stands in the request."""

    @property
    def modality(self) -> str:
        """`image`, `audio` or `video`."""


class Span(Protocol):
    """A stretch of a request's time, since it was made: a context, left when it is over."""

    @property
    def headers(self) -> Mapping[str, str]:
        """What an instance is sent, so that its spans are children of this one."""

    def answered(self, status: int) -> None:
        """An instance has answered with this HTTP status."""

    def event(self, name: str) -> None:
        """Something has happened, just now."""

    def link(self, other: "Span") -> None:
        """Another one, perhaps of another request, has to do with it."""

    def end(self, error: str | None = None) -> None:
        """It is over, by an error of this slug or by none; to be said again does nothing."""

    def __enter__(self) -> Self:
        """It goes on."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """It is over."""


class RequestSpan(Protocol):
    """A client's request, from its head to its end."""

    @property
    def trace_id(self) -> str:
        """The trace's, in hexadecimal."""

    @property
    def headers(self) -> Mapping[str, str]:
        """As `Span.headers`."""

    def asks(self, operation: str | None, model: str | None) -> None:
        """It asks for an operation of this name, a model of this one, where they are known."""

    def child(self, name: str, *, url: str | None = None, item: Item | None = None) -> Span:
        """Something that is done for it begins now.

        Args:
            name: what; one of few.
            url: where an instance is asked to do it.
            item: the item that it is done for.
        """

    def sent(self, name: str, item: Item) -> Span | None:
        """The last child of this name for an item, where there was one."""

    def done(self, event: RequestRecord) -> None:
        """It has ended."""


class Tracer(Protocol):
    """Makes spans."""

    def request(self, method: str, route: str, headers: Mapping[str, str]) -> RequestSpan:
        """A request begins now.

        Args:
            method: its HTTP method.
            route: its route's path, as declared.
            headers: the client's `traceparent` and `tracestate`, where it sent them.
        """
