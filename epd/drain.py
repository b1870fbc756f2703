"""How long a request may run: until its own time has passed, or the application's life ends."""

import asyncio
from types import TracebackType

from aiohttp import web

from epd.errors import Overloaded, ProxyError, UpstreamTimeout


class Drain:
    """Which requests run, and whether the application is about to stop.

    Attributes:
        began: it is, and whoever sends requests should send them elsewhere.
        over: it has, and what still runs is ended.
        running: the time that each request has.
    """

    def __init__(self) -> None:
        self.began = False
        self.over = False
        self.running: set[asyncio.Timeout] = set()
        self._one_ended = asyncio.Event()

    def begin(self) -> None:
        """Say from now on that the application is about to stop. Requests are served as before."""
        self.began = True

    def cut(self) -> None:
        """End the requests that run: what they are in the middle of raises `Overloaded`."""
        self.over = True
        now = asyncio.get_running_loop().time()
        for limit in self.running:
            limit.reschedule(now)

    async def idle(self) -> None:
        """Wait until no request runs."""
        while self.running:
            self._one_ended.clear()
            await self._one_ended.wait()

    def ended(self, limit: asyncio.Timeout) -> None:
        """A request runs no longer."""
        self.running.discard(limit)
        self._one_ended.set()

    def bounded(self, until_s: float | None = None) -> "Bounded":
        """Run a request in this context, until `cut` or a time on the event loop's clock.

        A request has one such context: `asyncio.timeout` takes a task that two of them have
        cancelled for one that somebody else cancelled.
        """
        return Bounded(self, until_s)


class Bounded:
    """The time that one request has."""

    __slots__ = ("_drain", "_limit")

    def __init__(self, drain: Drain, until_s: float | None) -> None:
        self._drain = drain
        self._limit = asyncio.timeout_at(0 if drain.over else until_s)

    async def __aenter__(self) -> None:
        """Begin."""
        await self._limit.__aenter__()
        self._drain.running.add(self._limit)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End.

        Raises:
            Overloaded: the application's time is over.
            UpstreamTimeout: the request's has passed.
        """
        self._drain.ended(self._limit)
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError:
            raise self._reason() from None

    def _reason(self) -> ProxyError:
        if self._drain.over:
            return Overloaded("the proxy is shutting down", slug="shutting_down")
        return UpstreamTimeout(
            "the request did not end in time", slug="request_timeout", stage="proxy"
        )


DRAIN = web.AppKey("drain", Drain)


async def send_elsewhere(request: web.Request, response: web.StreamResponse) -> None:
    """Have the client close its connection where this process is about to stop.

    For `on_response_prepare`. The client's next request then goes where it is looked for anew.
    """
    if request.app[DRAIN].began:
        response.force_close()
        response.headers["Connection"] = "close"
