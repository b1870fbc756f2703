"""The end of the application's life: it says so, lets requests end, and ends those that do not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.typedefs import Handler

from epd.errors import Overloaded


class Drain:
    """Which requests run, and whether the application is about to stop.

    Attributes:
        began: it is, and whoever sends requests should send them elsewhere.
    """

    def __init__(self) -> None:
        self.began = False
        self._over = False
        self._limits: dict[asyncio.Task[object], asyncio.Timeout] = {}
        self._one_ended = asyncio.Event()

    def begin(self) -> None:
        """Say from now on that the application is about to stop. Requests are served as before."""
        self.began = True

    def cut(self) -> None:
        """End the requests that run: what they are in the middle of raises `Overloaded`."""
        self._over = True
        now = asyncio.get_running_loop().time()
        for limit in self._limits.values():
            limit.reschedule(now)

    async def idle(self) -> None:
        """Wait until no request runs."""
        while self._limits:
            self._one_ended.clear()
            await self._one_ended.wait()

    @asynccontextmanager
    async def bounded(self) -> AsyncIterator[None]:
        """Run a request, or the part of one that handles its end itself, until `cut`.

        Raises:
            Overloaded: there is no more time.
        """
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in one
        outer = self._limits.get(task)
        try:
            async with asyncio.timeout(0 if self._over else None) as limit:
                # Of two, the inner one alone: `asyncio.timeout` takes a task that was cancelled
                # twice for one that somebody else cancelled.
                self._limits[task] = limit
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise Overloaded("the proxy is shutting down", slug="shutting_down") from None
        finally:
            if outer is None:
                del self._limits[task]
                self._one_ended.set()
            else:
                self._limits[task] = outer


DRAIN = web.AppKey("drain", Drain)


@web.middleware
async def end_in_time(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let a request run until the application's end, and no longer."""
    async with request.app[DRAIN].bounded():
        return await handler(request)


async def send_elsewhere(request: web.Request, response: web.StreamResponse) -> None:
    """Have the client close its connection where this process is about to stop.

    For `on_response_prepare`. The client's next request then goes where it is looked for anew.
    """
    if request.app[DRAIN].began:
        response.force_close()
        response.headers["Connection"] = "close"
