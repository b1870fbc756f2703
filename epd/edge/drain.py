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
        running: the requests.
    """

    def __init__(self) -> None:
        self.began = False
        self.over = False
        self.running: set[Bounded] = set()
        self._none_runs: asyncio.Event | None = None
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
            self._none_runs = self._none_runs or asyncio.Event()
            await self._none_runs.wait()

    def add(self, request: "Bounded") -> None:
        """A request runs, for `Bounded` alone."""
        self.running.add(request)
        if self.over:
            request.end_soon()
        elif request.until_s < self._timer_s:
            self._set_timer(request.until_s)

    def ended(self, request: "Bounded") -> None:
        """A request runs no longer, for `Bounded` alone."""
        self.running.discard(request)
        if not self.running and self._none_runs is not None:
            self._none_runs.set()
            self._none_runs = None

    def bounded(self, until_s: float = math.inf) -> "Bounded":
        """Run a request in this context, until `cut` or a time on the monotonic clock."""
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
        ends = [one.until_s for one in self.running if now_s < one.until_s < math.inf]
        if ends:
            self._set_timer(min(ends))

    def _end_late(self, now_s: float) -> None:
        for request in self.running:
            if request.until_s <= now_s:
                request.end_soon()


class Bounded:
    """The time that one request has, as `asyncio.timeout` would bound it without a timer each.

    A task has one such context at a time.

    Attributes:
        until_s: when the time has passed, on the monotonic clock.
    """

    __slots__ = ("_cancelled", "_cancels", "_drain", "_ending", "_task", "until_s")

    _task: "asyncio.Task[object]"
    _cancels: int

    def __init__(self, drain: Drain, until_s: float) -> None:
        self._drain = drain
        self._ending: asyncio.Handle | None = None
        self._cancelled = False
        self.until_s = until_s

    def end_soon(self) -> None:
        """Cancel the task once the loop is back, if the context has not ended by then."""
        if self._ending is None:
            self._ending = self._task.get_loop().call_soon(self._end)

    def _end(self) -> None:
        self._cancelled = True
        self._task.cancel()

    def __enter__(self) -> None:
        """Begin.

        Raises:
            RuntimeError: there is no task to end.
        """
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a request runs in a task")
        self._task, self._cancels = task, task.cancelling()
        self._drain.add(self)

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End.

        Raises:
            Overloaded: the application's time is over.
            UpstreamTimeout: the request's has passed.
        """
        self._drain.ended(self)
        if self._ending is None:
            return
        self._ending.cancel()
        if not self._cancelled:
            return
        others = self._task.uncancel() - self._cancels
        if others <= 0 and isinstance(error, asyncio.CancelledError):
            raise self._reason() from None

    def _reason(self) -> ProxyError:
        if self._drain.over:
            return Overloaded("the proxy is shutting down", slug="shutting_down")
        return UpstreamTimeout(
            "the request did not end in time", slug="request_timeout", stage="proxy"
        )


DRAIN = web.AppKey("drain", Drain)
