"""Requests about KV blocks outside of the stages: connector facts, and releases.

Some transfers need KV connector facts of a prefill instance in advance. Background requests ask
decode to release the KV blocks of abandoned prefills.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from epd.aio import Flights
from epd.api.items import Body
from epd.config.sections.limits import LimitSettings
from epd.errors import Outcome, ProxyError, UpstreamDied
from epd.json_or_none import json_or_none
from epd.request.context import RequestContext
from epd.request.stage_inputs import PreparedRequest
from epd.request.stages import RELEASE_TIMEOUT_S, Prefilled, Stages
from epd.routing.fatal import FatalRequests
from epd.routing.instances import Instance
from epd.routing.table import InstanceTable
from epd.transfer import Params, with_params
from epd.transfer.encoded import Consumed
from epd.transfer.kv import KVTransfer, Pair
from epd.upstream import Upstream

KNOWN_S = 10.0
"""Lifetime of a fact, in seconds. No replacement of an instance becomes ready faster."""

Member = tuple[Instance, int | None]
"""Prefill instance, and its data-parallel rank if the proxy names one."""


class _Known(NamedTuple):
    peer: Params
    until_s: float


@dataclass(slots=True, eq=False)
class PeerRegistry:
    """KV connector facts of instances, kept for `KNOWN_S` and dropped after a failure.

    They are queried, or learned from replies. Belongs to one event loop.
    """

    _table: InstanceTable
    _transfer: KVTransfer
    _upstream: Upstream
    _config: LimitSettings
    _known: dict[Member, _Known] = field(default_factory=dict)
    _flights: Flights[Member, Params] = field(default_factory=Flights)

    async def params_for(self, pair: Pair) -> Params | None:
        """Return the facts of a prefill's connector; None if there are none and no URL to query.

        A failed query counts as a failure of the instance. A successful one has no effect on
        health.

        Raises:
            ProxyError: the connector did not answer the query.
        """
        member = pair.prefill, pair.prefill_rank
        known = self._known.get(member)
        if known is not None and time.monotonic() < known.until_s:
            return known.peer
        if (url := self._transfer.peer_url(pair.prefill)) is None:
            return None
        return await self._flights.join(member, lambda: self._ask(member, url))

    def learn_facts(self, pair: Pair, replied: Params) -> None:
        """Keep the facts in a prefill's reply."""
        if (learned := self._transfer.facts_of_reply(pair, replied)) is not None:
            self._remember((pair.prefill, pair.prefill_rank), learned)

    def forget_instance(self, instance: Instance) -> None:
        """Drop the facts of all ranks of an instance, which may have been replaced."""
        self._known = {rank: known for rank, known in self._known.items() if rank[0] != instance}

    async def _ask(self, member: Member, url: str) -> Params:
        try:
            answer = await self._upstream.fetch(
                url, stage="prefill", headers={}, timeout_s=self._config.health_timeout_s
            )
            peer = self._transfer.parse_peer(json_or_none(answer.body) if answer.ok else None)
        except ProxyError as error:
            if error.outcome is Outcome.REFUSED:  # it is not the port of the instance's requests
                error.outcome = Outcome.UNREACHABLE
            # A success would only show that the port answers, and reset the engine's failures.
            with self._table.track_request(member[0]):
                raise
        self._remember(member, peer)
        return peer

    def _remember(self, member: Member, peer: Params) -> None:
        now_s = time.monotonic()
        if member not in self._known:  # drop expired entries of instances that left
            self._known = {
                rank: known for rank, known in self._known.items() if now_s < known.until_s
            }
        self._known[member] = _Known(peer, now_s + KNOWN_S)


ChooseInstance = Callable[[Sequence[Instance], RequestContext], Instance | None]
"""Returns an untried decode instance, given the tried ones; None if there is none."""


@dataclass(slots=True, eq=False)
class KVHandover:
    """KV blocks of a prefill, until decode has read them.

    If an error ends the context before that, decode is asked to release them.

    Attributes:
        pair: the prefill, and what decode needs to know of it.
        prefilled: reply of prefill; None without one.
        params: `kv_transfer_params` of the decode request; None for none.
        decode: the decode instance that got the request; None before that.
        accepted: whether decode has begun a 2xx answer.
    """

    _releases: "Releases"
    _choose_release_instance: ChooseInstance
    prepared: PreparedRequest
    pair: Pair
    prefilled: Prefilled | None = None
    params: Params | None = None
    decode: Instance | None = None
    accepted: bool = False

    def begin_decode(self, instance: Instance) -> Consumed:
        """Return the request for the decode instance."""
        self.decode = instance
        consumed, context = self.prepared.consumed, self.prepared.stage_input.context
        body = with_params(consumed.body, self.params)
        if self.prefilled is not None and context.turn is not None and context.endpoint.tokenized:
            body = context.turn.with_tokens(body)
        return consumed._replace(body=body)

    def record_answer(self) -> None:
        self.accepted = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        params = None if self.prefilled is None else self.prefilled.params
        if error is None or params is None or not self._is_held(error):
            return
        stage_input = self.prepared.stage_input
        context, tried = stage_input.context, stage_input.attempt.avoided_decodes
        if self.decode is not None:
            tried = (*tried, self.decode)
        # The instance that received the request, or another one if that failed.
        instance = tried[-1] if tried else None
        if isinstance(error, ProxyError) or instance is None:
            instance = self._choose_release_instance(tried, context) or instance
        if instance is not None:
            body = with_params(self.prepared.consumed.body, params)
            self._releases.begin_release(instance, body, context)

    def _is_held(self, error: BaseException) -> bool:
        """Return whether prefill still holds the blocks, and decode can be asked to release them.

        A release is skipped in four cases. If a decode instance may have died of the request, no
        other one receives it, and the blocks stay until their lease expires. After a 500, decode's
        engine has notified prefill itself (after a 4xx it has not, because it rejected the request
        earlier). If decode has sent the head of its answer, aborting it notifies prefill, and a
        release would then read blocks that prefill has freed. If the media of the decode request
        have made room for others, it cannot be sent, and the blocks stay until their lease expires.
        """
        context = self.prepared.stage_input.context
        if self.accepted or context.watched.deaths is not None:
            return False
        if context.gave_up_media and context.record.media.get("raw"):
            return False
        return not (isinstance(error, ProxyError) and (error.died or error.engine_failed))


@dataclass(frozen=True, slots=True, eq=False)
class Releases:
    """Releases of KV blocks in progress."""

    _stages: Stages
    _transfer: KVTransfer
    _fatal: FatalRequests
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @classmethod
    @asynccontextmanager
    async def run_releases(
        cls, stages: Stages, transfer: KVTransfer, fatal: FatalRequests
    ) -> AsyncIterator[Self]:
        """Wait at the exit for the releases in progress, at most `RELEASE_TIMEOUT_S`."""
        releases = cls(stages, transfer, fatal)
        try:
            yield releases
        finally:
            tasks = [*releases._tasks]
            if tasks:
                await asyncio.wait(tasks, timeout=RELEASE_TIMEOUT_S)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def begin_release(self, instance: Instance, body: Body, context: RequestContext) -> None:
        """Send a release to a decode instance in the background, if the transfer needs one.

        `body` is the decode request, with its `kv_transfer_params`.
        """
        if not self._transfer.released:
            return
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
