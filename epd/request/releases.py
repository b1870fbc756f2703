"""Releases: requests to decode that free the KV blocks of abandoned prefills.

They run in the background, and may end after the client's request.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

from epd.aio import end_tasks
from epd.api.items import Body
from epd.errors import ProxyError
from epd.request.choices import Choices
from epd.request.recovery import Attempt
from epd.request.request import Request
from epd.request.stages import RELEASE_TIMEOUT_S, Stages
from epd.routing.fatal import FatalRequests
from epd.routing.instances import Instance
from epd.transfer import with_params
from epd.transfer.kv import Handover, KVTransfer


@dataclass(frozen=True, slots=True, eq=False)
class Releases:
    """Releases of KV blocks in progress."""

    _stages: Stages
    _transfer: KVTransfer
    _fatal: FatalRequests
    _choices: Choices
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def aclose(self) -> None:
        """Wait for the releases in progress, at most `RELEASE_TIMEOUT_S`."""
        tasks = [*self._tasks]
        if tasks:
            await asyncio.wait(tasks, timeout=RELEASE_TIMEOUT_S)
        await end_tasks(tasks)

    def release_unread(
        self, request: Request, attempt: Attempt, handover: Handover, error: BaseException
    ) -> None:
        """Release the blocks of a handover that ended in this error before decode read them."""
        if not self._transfer.released or not _are_held(request, handover, error):
            return
        tried = attempt.tried_decodes
        # The instance that received the request, or another one if that failed.
        instance = tried[-1] if tried else None
        if isinstance(error, ProxyError) or instance is None:
            instance = self._choices.choose_release_instance(tried, request) or instance
        if instance is not None:
            body = with_params(attempt.prompt.body, handover.params)
            task = asyncio.create_task(self._release(instance, body, request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _release(self, instance: Instance, body: Body, request: Request) -> None:
        with suppress(ProxyError, TimeoutError):  # the observers have the result
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                try:
                    await self._stages.release(instance, body, request)
                except ProxyError as error:
                    self._fatal.final_error(error, instance, request.watched)


def _are_held(request: Request, handover: Handover, error: BaseException) -> bool:
    """Return whether prefill holds blocks, and decode can be asked to release them.

    A release is skipped in three cases. If a decode instance may have died of the request, no other
    one receives it, and the blocks stay until their lease expires. After a 500, decode's engine has
    notified prefill itself (after a 4xx it has not, because it rejected the request earlier). If
    decode has sent the head of its answer, aborting it notifies prefill, and a release would then
    read blocks that prefill has freed.
    """
    if not handover.prefilled or handover.params is None or handover.accepted:
        return False
    if request.watched.deaths.count:
        return False
    return not (isinstance(error, ProxyError) and (error.died or error.engine_failed))
