"""Prefills that nobody waits for any more: decode is told, after the request has ended."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Self

from epd.bodies.items import Body
from epd.errors import ProxyError, UpstreamDied
from epd.request.context import RequestContext
from epd.request.stages import RELEASE_TIMEOUT_S, Stages
from epd.routing.fatal import FatalRequests
from epd.routing.instances import Instance


class Releases:
    """Those that are under way."""

    def __init__(self, stages: Stages, fatal: FatalRequests) -> None:
        self._stages = stages
        self._fatal = fatal
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def running(cls, stages: Stages, fatal: FatalRequests) -> AsyncIterator[Self]:
        """Leaving waits for those that are under way, for as long as one may take."""
        releases = cls(stages, fatal)
        try:
            yield releases
        finally:
            await releases._ended()

    def begin(self, instance: Instance, body: Body, context: RequestContext) -> None:
        """Tell a decode instance, in the background.

        Args:
            instance: the one that is told.
            body: the decode request, with its `kv_transfer_params`.
            context: the request's.
        """
        task = asyncio.create_task(self._release(instance, body, context))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release(self, instance: Instance, body: Body, context: RequestContext) -> None:
        with suppress(ProxyError, TimeoutError):  # the observers were told
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                try:
                    await self._stages.release(instance, body, context)
                except UpstreamDied as error:
                    self._fatal.after(error, instance, context.watched)

    async def _ended(self) -> None:
        tasks = [*self._tasks]
        if tasks:
            await asyncio.wait(tasks, timeout=RELEASE_TIMEOUT_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
