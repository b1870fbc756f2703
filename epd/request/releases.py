"""Releases: requests to decode that free the KV blocks of abandoned prefills.

They run in the background, and may end after the client's request.
"""

import asyncio
from dataclasses import dataclass, field

from epd.aio import end_tasks
from epd.api.items import Body
from epd.errors import ProxyError
from epd.request.attempt import Attempt
from epd.request.choices import Choices
from epd.request.request import Request
from epd.request.stages import Stages
from epd.routing.fatal import FatalRequests
from epd.routing.instances import Instance
from epd.transfer.kv import KVTransfer

RELEASE_TIMEOUT_S = 5.0
"""Timeout of a decode instance's answer to a release, in seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Releases:
    """Releases of KV blocks in progress."""

    _stages: Stages
    _transfer: KVTransfer
    _fatal: FatalRequests
    _choices: Choices
    _timeout_s: float = RELEASE_TIMEOUT_S
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def aclose(self) -> None:
        """Wait for the releases in progress, at most as long as one may take."""
        tasks = [*self._tasks]
        if tasks:
            await asyncio.wait(tasks, timeout=self._timeout_s)
        await end_tasks(tasks)

    def release_unread(
        self, attempt: Attempt, body: Body, decode: Instance | None, error: BaseException
    ) -> None:
        """Release the blocks of a prefill after this error, before decode accepted them.

        `body` is that of the request to decode. `decode` is the instance that received it; None if
        none could be chosen.
        """
        has_blocks = self._transfer.released and "kv_transfer_params" in body
        if not has_blocks or not _may_release(attempt.request, decode, error):
            return
        # The instance that received the request last, or another one if that failed.
        instance = decode
        if isinstance(error, ProxyError):
            tried = attempt.tried_decodes(decode)
            instance = self._choices.choose_release_instance(tried, attempt.request) or decode
        if instance is None:
            return
        task = asyncio.create_task(self._release(instance, body, attempt.request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release(self, instance: Instance, body: Body, request: Request) -> None:
        try:
            await self._stages.release(instance, body, request, self._timeout_s)
        except ProxyError as error:  # the observers have it
            self._fatal.count_death(error, instance, request.watched)


def _may_release(request: Request, decode: Instance | None, error: BaseException) -> bool:
    """Return whether an instance can be asked to release the blocks, after this error of `decode`.

    A release is skipped in two cases. If a decode instance may have died of the request, no other
    one receives it, and the blocks stay until their lease expires. After a 500, decode's engine has
    notified prefill itself (after a 4xx it has not, because it rejected the request earlier).
    """
    watched = request.watched
    url = (watched.pins or {}).get("decode") if decode is None else decode.url
    if watched.deaths.count or url in watched.fatal_to:
        return False
    if decode is None or not isinstance(error, ProxyError):
        return True
    return not (error.died or error.engine_failed)
