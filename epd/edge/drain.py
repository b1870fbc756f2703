"""How long a request may run: until its own time has passed, or the application's life ends."""

import asyncio
import math
import time
from types import TracebackType

from aiohttp import web

from epd.errors import Overloaded, ProxyError, UpstreamTimeout


class Drain:
    """Which requests run, and whether the application is about to stop.

    One timer serves them all: it is set for the earliest end, and looks again from there.

    Attributes:
        began: it is, and whoever sends requests should send them elsewhere.
        over: it has, and what still runs is ended.
        running: the requests, and when the time of each has passed, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.began = False
        self.over = False
        self.running: dict[asyncio.Timeout, float] = {}
        self._one_ended = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf

    def begin(self) -> None:
        """Say from now on that the application is about to stop. Requests are served as before."""
        self.began = True

    def cut(self) -> None:
        """End the requests that run: what they are in the middle of raises `Overloaded`."""
        self.over = True
        self._end_late(math.inf)

    async def idle(self) -> None:
        """Wait until no request runs."""
        while self.running:
            self._one_ended.clear()
            await self._one_ended.wait()

    def add(self, limit: asyncio.Timeout, until_s: float) -> None:
        """A request runs, for `Bounded` alone."""
        self.running[limit] = until_s
        if self.over:
            limit.reschedule(0)
        elif until_s < self._timer_s:
            self._set_timer(until_s)

    def ended(self, limit: asyncio.Timeout) -> None:
        """A request runs no longer, for `Bounded` alone."""
        del self.running[limit]
        self._one_ended.set()

    def bounded(self, until_s: float = math.inf) -> "Bounded":
        """Run a request in this context, until `cut` or a time on the monotonic clock.

        A request has one such context: `asyncio.timeout` takes a task that two of them have
        cancelled for one that somebody else cancelled.
        """
        return Bounded(self, until_s)

    def _set_timer(self, when_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = when_s - time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, delay_s), self._look)
        self._timer_s = when_s

    def _look(self) -> None:
        self._timer, self._timer_s = None, math.inf
        now_s = time.monotonic()
        self._end_late(now_s)
        if later := [until_s for until_s in self.running.values() if now_s < until_s < math.inf]:
            self._set_timer(min(later))

    def _end_late(self, now_s: float) -> None:
        for limit, until_s in self.running.items():
            if until_s <= now_s and not limit.expired():
                limit.reschedule(0)  # which is past: at once


class Bounded:
    """The time that one request has."""

    __slots__ = ("_drain", "_limit", "_until_s")

    def __init__(self, drain: Drain, until_s: float) -> None:
        self._drain = drain
        self._until_s = until_s
        self._limit = asyncio.timeout_at(None)

    async def __aenter__(self) -> None:
        """Begin."""
        await self._limit.__aenter__()
        self._drain.add(self._limit, self._until_s)

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
