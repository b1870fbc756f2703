"""End of requests: at their own deadlines, and when the application drains."""

import asyncio
import math
import time
from dataclasses import dataclass, field

from aiohttp import web

from epd.errors import Overloaded, UpstreamTimeout


class Drain:
    """Running requests of an application, and the state of its drain.

    One timer serves all requests: it is set for the earliest deadline, and then for the next one.

    Attributes:
        began: whether the drain has begun: clients should send requests to another process.
            Requests are still served.
        over: whether `cut_off` was called: running requests are ended.
        running: running requests.
    """

    def __init__(self) -> None:
        self.began = False
        self.over = False
        self.running: set[Bounded] = set()
        self._none_runs: asyncio.Event | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf

    def cut_off(self) -> None:
        """End the running requests with `Overloaded`."""
        self.over = True
        self._end_late(math.inf)

    async def idle(self) -> None:
        while self.running:
            self._none_runs = self._none_runs or asyncio.Event()
            await self._none_runs.wait()

    def add(self, request: "Bounded") -> None:
        """Register a running request. Only `Bounded` calls this."""
        self.running.add(request)
        if self.over:
            request.end_soon()
        elif request.until_s < self._timer_s:
            self._set_timer(request.until_s)

    def remove_request(self, request: "Bounded") -> None:
        """Remove a request that has ended. Only `Bounded` calls this."""
        self.running.discard(request)
        if not self.running and self._none_runs is not None:
            self._none_runs.set()
            self._none_runs = None

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
        later = (request.until_s for request in self.running if request.until_s > now_s)
        if (next_s := min(later, default=math.inf)) < math.inf:
            self._set_timer(next_s)

    def _end_late(self, now_s: float) -> None:
        for request in self.running:
            if request.until_s <= now_s:
                request.end_soon()


@dataclass(slots=True, eq=False)
class Bounded:
    """Context of one request, which ends at its deadline and at `Drain.cut_off`.

    It is `asyncio.timeout` without a timer per request, which would take three times as long.

    A task has one such context at a time.

    Attributes:
        until_s: deadline on the monotonic clock, in seconds.
    """

    _drain: Drain
    until_s: float = math.inf
    _ending: asyncio.Handle | None = None
    _cancelled: bool = False
    _task: "asyncio.Task[object]" = field(init=False)
    _cancels: int = field(init=False)

    def end_soon(self) -> None:
        """Cancel the task in the next iteration of the loop, unless the context ends first."""
        if self._ending is None:
            self._ending = self._task.get_loop().call_soon(self._end)

    def _end(self) -> None:
        self._cancelled = True
        self._task.cancel()

    def __enter__(self) -> None:
        """Start the deadline of the current task.

        Raises:
            RuntimeError: the code does not run in a task.
        """
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a request runs in a task")
        self._task, self._cancels = task, task.cancelling()
        self._drain.add(self)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Replace the cancellation by the error that caused it.

        Raises:
            Overloaded: the application's drain ended the request.
            UpstreamTimeout: the request reached its deadline.
        """
        self._drain.remove_request(self)
        if self._ending is None:
            return
        self._ending.cancel()
        if not self._cancelled:
            return
        others = self._task.uncancel() - self._cancels
        if others <= 0 and isinstance(error, asyncio.CancelledError):
            if self._drain.over:
                raise Overloaded("the proxy is shutting down", slug="shutting_down") from None
            raise UpstreamTimeout(
                "the request did not end in time", slug="request_timeout"
            ) from None


DRAIN = web.AppKey("drain", Drain)
