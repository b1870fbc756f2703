"""Background requests that ask decode to release the KV blocks of abandoned prefills."""

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
    """The releases in progress."""

    def __init__(self, stages: Stages, fatal: FatalRequests) -> None:
        self._stages = stages
        self._fatal = fatal
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def running(cls, stages: Stages, fatal: FatalRequests) -> AsyncIterator[Self]:
        """Wait at the exit for the releases in progress, at most `RELEASE_TIMEOUT_S`."""
        releases = cls(stages, fatal)
        try:
            yield releases
        finally:
            await releases._ended()

    def begin(self, instance: Instance, body: Body, context: RequestContext) -> None:
        """Send a release to a decode instance in the background.

        Args:
            instance: the decode instance.
            body: the decode request, with its `kv_transfer_params`.
            context: context of the request.
        """
        task = asyncio.create_task(self._release(instance, body, context))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release(self, instance: Instance, body: Body, context: RequestContext) -> None:
        with suppress(ProxyError, TimeoutError):  # the observers have the result
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
