"""Answers of instances: complete ones, and ones that are still arriving."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from epd.errors import AnswerTooLarge, ProxyError, Stage
from epd.http.connection import Connection, Sink
from epd.upstream.faults import FAILURES, cause, shown

MAX_ANSWER_BYTES = 16 * 1024**2
"""Maximum size of an answer of an encode or prefill instance, and of an error."""


def is_success(status: int) -> bool:
    """Return whether a status is a 2xx."""
    return 200 <= status < 300  # noqa: PLR2004 - a member of `HTTPStatus` takes a call


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer of an instance."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def ok(self) -> bool:
        """Whether the status is a 2xx."""
        return is_success(self.status)


class Reply:
    """An answer after its head. It must be closed, or used as a context manager.

    Attributes:
        status: HTTP status.
        headers: headers of the answer, case-insensitive.
        ok: whether the status is a 2xx.
    """

    __slots__ = (
        "_body",
        "_clock",
        "_connection",
        "_late",
        "_release",
        "_stage",
        "_until_s",
        "headers",
        "ok",
        "status",
    )

    def __init__(
        self,
        connection: Connection,
        stage: Stage,
        until_s: float,
        late: str,
        release: Callable[[], None],
    ) -> None:
        """Read the body from a connection.

        Args:
            connection: connection of the answer.
            stage: stage of the instance.
            until_s: deadline of the body, on the event loop's clock.
            late: slug of a timeout.
            release: function that pools the connection of a complete answer, and closes any other.
        """
        self.status = connection.status
        self.headers: Mapping[str, str] = connection.headers
        self.ok = is_success(self.status)
        self._connection = connection
        self._stage: Stage = stage
        self._until_s = until_s
        self._late = late
        self._release = release
        self._body: bytes | None = None
        self._clock = asyncio.get_running_loop().time

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    def close(self) -> None:
        self._release()

    @property
    def is_stream(self) -> bool:
        """Whether the body is a stream of events. The head of a stream precedes its first token."""
        return self.headers.get("Content-Type", "").startswith("text/event-stream")

    async def read(self, *, idle_s: float, limit: int = MAX_ANSWER_BYTES) -> bytes:
        """Return the whole body. Further calls return it again.

        Raises:
            UpstreamFailed: it is larger than `limit` bytes, or was cut off.
            UpstreamTimeout: nothing was received for `idle_s` seconds.
        """
        if self._body is not None:
            return self._body
        if self._connection.complete and self._connection.held <= limit:
            self._body = self._connection.take()
            return self._body
        parts = []
        size = 0
        while not self._connection.ended and (chunk := await self.chunk(idle_s)):
            parts.append(chunk)
            size += len(chunk)
            if size > limit:
                raise AnswerTooLarge(
                    f"the {self._stage} instance's answer is larger than {limit} bytes",
                    slug=f"{self._stage}_bad_response",
                    stage=self._stage,
                )
        self._body = parts[0] if len(parts) == 1 else b"".join(parts)
        return self._body

    async def begun(self, idle_s: float) -> None:
        """Wait for the first byte of the body.

        Raises:
            UpstreamFailed: the connection broke.
            UpstreamTimeout: nothing was received for `idle_s` seconds.
        """
        if self._connection.complete or self._connection.held:
            return
        try:
            await self._connection.begun(min(self._clock() + idle_s, self._until_s))
        except FAILURES as error:
            raise self._broke_off(error) from cause(error)

    async def chunk(self, idle_s: float) -> bytes:
        """Return the next received part of the body; empty at its end.

        Raises:
            UpstreamFailed: the body was cut off.
            UpstreamTimeout: nothing was received for `idle_s` seconds.
        """
        try:
            return await self._connection.chunk(min(self._clock() + idle_s, self._until_s))
        except FAILURES as error:
            raise self._broke_off(error) from cause(error)

    async def pour(self, sink: Sink, idle_s: float) -> bool:
        """Pass the body to `sink` as it is received, without waking a task, while it accepts more.

        Returns:
            Whether the body has ended.

        Raises:
            UpstreamFailed: the body was cut off.
            UpstreamTimeout: nothing was received for `idle_s` seconds.
        """
        try:
            return await self._connection.pour(sink, idle_s)
        except FAILURES as error:
            raise self._broke_off(error) from cause(error)

    def _broke_off(self, error: Exception) -> ProxyError:
        # The head of a stream precedes its first token; any other head follows the last one.
        computed = not self.is_stream
        broken = f"{self._stage}_died"
        return shown(error, self._stage, broken=broken, late=self._late, computed=computed)
