"""Prefill and decode of one attempt, after its items are encoded."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from epd.aio import StrictTaskGroup
from epd.errors import NoInstance, ProxyError, SuspectedFatal, UpstreamDied, slug_of
from epd.request.kv_peers import KVHandover, PeerRegistry
from epd.request.kv_readback import Readbacks
from epd.request.recovery import FailedAttempt
from epd.request.stage_inputs import EarlyTargets, PreparedRequest
from epd.request.stages import Opened, Prefilled, Stages
from epd.request.targets import Decoders
from epd.routing.balance import Choice
from epd.routing.fatal import FatalRequests
from epd.routing.instances import CONSUMERS, Instance, Role
from epd.routing.table import NO_WORK, InFlight, InstanceTable, Reservation
from epd.transfer.kv import KVTransfer, Pair
from epd.upstream import Reply

T = TypeVar("T")

DIES_WITHIN_S = 1.0
"""Time after one instance's death in which the other instance of the request is watched, in
seconds."""


@dataclass(slots=True, eq=False)
class DecodeAnswer:
    """Decode's answer, as `Stages.decode` opened it. It must be closed, or used as a context.

    The request at its instance, `_using`, has begun. `_ended` gets the answer's error, or None.
    """

    _opened: Opened
    _using: InFlight
    _ended: Callable[[BaseException | None], None]

    def close(self, error: BaseException | None) -> None:
        """Close the answer, and judge its instance by the error."""
        if self._opened.span is not None:
            self._opened.span.end_span(slug_of(error))
        self._opened.reply.close()
        self._using.end_request(error)
        self._ended(error)

    def __enter__(self) -> Reply:
        return self._opened.reply

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)


@dataclass(frozen=True, slots=True, eq=False)
class PrefillDecodeStages:
    """Runner of prefill and decode of an attempt, after its encode."""

    _table: InstanceTable
    _prefills: Choice
    _stages: Stages
    _transfer: KVTransfer
    _peers: PeerRegistry
    _decoders: Decoders
    _readbacks: Readbacks
    _fatal: FatalRequests

    def other_prefills(self, failed: FailedAttempt) -> bool:
        """Return whether there is an eligible prefill instance that has not had the request."""
        tried, prefill = failed.attempt.avoided_prefills, failed.progress.prefill
        if prefill is not None:
            tried = (*tried, prefill)
        return failed.attempt.course.prefill_url is None and self._prefills.has_untried(tried)

    async def choose_early_targets(self, prepared: PreparedRequest) -> EarlyTargets:
        """Choose the consumer of a request, with its data-parallel rank, before the encode.

        Raises:
            NoInstance: no instance is available.
        """
        await self._readbacks.begin_turn(prepared.stage_input.context)
        if self._needs_prefill(prepared):
            prefix = prepared.prefill_prefix
            return EarlyTargets(
                self._table.reserve_place(self._prefill_instance(prepared), prefix=prefix)
            )
        if not self._table.has(Role.PREFILL_DECODE):
            return EarlyTargets()  # a decode instance loads no outputs, and is chosen later
        decode = await self.choose_decode(prepared)
        if decode.role in CONSUMERS:
            return EarlyTargets(self._table.reserve_place(decode, prefix=prepared.decode_prefix))
        return EarlyTargets(decode=decode)  # keep the choice: a picker is called only once

    async def choose_prefill(
        self, prepared: PreparedRequest, targets: EarlyTargets
    ) -> Reservation | None:
        """Return a place at the prefill instance; None if decode serves the request alone.

        Raises:
            NoInstance: no instance is available.
        """
        await self._readbacks.begin_turn(prepared.stage_input.context)
        if not self._needs_prefill(prepared):
            return None
        instance = targets.consumer or self._prefill_instance(prepared)
        rank, prefix = targets.consumer_rank, prepared.prefill_prefix
        return self._table.reserve_place(instance, rank, prefix=prefix)

    async def make_pair(self, prepared: PreparedRequest, place: Reservation) -> Pair:
        """Collect what prefill and decode need to know of each other.

        Raises:
            ProxyError: no instance is available, or a request to one failed.
        """
        attempt, context = prepared.stage_input.attempt, prepared.stage_input.context
        prefill = place.instance
        request_id = context.child_id() if attempt.resent else context.request_id
        try:
            earlier = await self._readbacks.previous_params(prepared, prefill)
        except UpstreamDied as error:
            raise self._counted(error, prefill, prepared) from error.__cause__
        pair = Pair(request_id, prefill, place.rank, earlier=earlier)
        if attempt.course.decode_choice == "early" or self._transfer.eager:
            pair = pair._replace(decode=await self.choose_decode(prepared, pair))
        return pair._replace(peer=await self._peers.params_for(pair))

    async def choose_decode(self, prepared: PreparedRequest, pair: Pair | None = None) -> Instance:
        """Choose the decode instance. Without a pair, it prefills the request.

        Raises:
            ProxyError: no instance is available, or the choice failed.
        """
        attempt, context = prepared.stage_input.attempt, prepared.stage_input.context
        return await self._decoders.pick_instance(
            attempt, context, pair and pair.prefill, prefix=prepared.decode_prefix
        )

    def at_once(self, pair: Pair) -> bool:
        """Return whether prefill and decode of this pair run at the same time."""
        return self._transfer.decode_concurrent(pair)

    async def prefill(self, handover: KVHandover) -> None:
        """Send the request to prefill. If decode is chosen already, reserve its place.

        Raises:
            ProxyError: the instance failed, or rejected the request.
        """
        decode = handover.pair.decode
        with nullcontext() if decode is None else self._table.reserve_place(decode):
            handover.prefilled = await self._prefilled(handover)
        handover.params = handover.prefilled.params

    async def decode(
        self,
        prepared: PreparedRequest,
        instance: Instance,
        handover: KVHandover | None = None,
        *,
        rank: int | None = None,
    ) -> DecodeAnswer:
        """Return decode's answer, opened. Without a handover, decode prefills the request.

        Raises:
            ProxyError: the instance failed, or rejected the request.
        """
        consumed, work, context = prepared.consumed, prepared.work, prepared.stage_input.context
        request_id = on_head = prefill = None
        if handover is not None:
            consumed, work = handover.begin_decode(instance), NO_WORK
            request_id, prefill = handover.pair.request_id, handover.pair.prefill
            on_head = handover.record_answer
        using = self._table.track_request(
            instance,
            rank=rank,
            prefix=prepared.decode_prefix,
            work=work,
        ).begin_request()
        if handover is None:
            context.record.prefix_tokens = using.matched
            context.prefill_usage = {}
        try:
            opened = await self._stages.decode(
                instance, consumed, context, using.rank, request_id, on_head=on_head
            )
        except BaseException as error:
            using.end_request(error)
            if not isinstance(error, ProxyError):
                raise
            loads = prepared.may_lack_state("decode", loads_blocks=handover is not None)
            context.doubts.add(error, using, loads=loads)
            if prefill is not None and not error.rejects_request:
                self._peers.forget_instance(prefill)
            raise self._counted(error, instance, prepared) from error.__cause__
        using.record_answer()
        context.doubts.settle(instance)
        if context.turn is not None:
            context.turn.decode = instance.url
            context.turn.prefill = None if prefill is None else prefill.url
        return DecodeAnswer(opened, using, self._judging(instance, prepared))

    async def prefill_and_decode(self, handover: KVHandover, instance: Instance) -> DecodeAnswer:
        """Decode while prefill runs. Decode's head may precede its tokens by a long time.

        Raises:
            ProxyError: the first failure of the two.
        """
        handover.params = self._transfer.decode_params(handover.pair, {})
        halves = Halves()
        with ExitStack() as stack:
            try:
                async with StrictTaskGroup() as group:
                    prefill = self._prefilled(handover)
                    prefilling = group.create_task(halves.run("prefill", prefill))
                    decode = self.decode(handover.prepared, instance, handover)
                    opening = group.create_task(halves.run("decode", decode))
                    stack.callback(_close, opening)
                    await asyncio.wait((prefilling, opening))
            except ExceptionGroup as failed:
                first = failed.exceptions[0]
                of_prefill = isinstance(first, ProxyError) and first.stage == "prefill"
                if not of_prefill and _is_done(prefilling):
                    handover.prefilled = prefilling.result()
                raise first from first.__cause__
            stack.pop_all()
        return opening.result()

    def _prefill_instance(self, prepared: PreparedRequest) -> Instance:
        attempt, context = prepared.stage_input.attempt, prepared.stage_input.context
        url = attempt.course.prefill_url
        if url is None:
            return context.watched.choose_instance(
                "prefill",
                lambda fits: self._prefills.best_instance(
                    attempt.avoided_prefills,
                    balance=context.config.prefill_balance,
                    session=context.session,
                    prefix=prepared.prefill_prefix,
                    prefer=None if context.turn is None else context.turn.prefers_prefill,
                    fits=fits,
                ),
            )
        if (local := self._table.find_instance(url, Role.PREFILL)) is None:
            raise NoInstance(
                "the prefill instance beside the proxy is not in the instance table; register it",
                slug="no_prefill",
                stage="prefill",
            )
        return local

    def _needs_prefill(self, prepared: PreparedRequest) -> bool:
        attempt, context = prepared.stage_input.attempt, prepared.stage_input.context
        wanted = attempt.course.prefill and not attempt.without_prefill
        return wanted and context.endpoint.can_prefill(prepared.consumed.body)

    async def _prefilled(self, handover: KVHandover) -> Prefilled:
        prepared, pair = handover.prepared, handover.pair
        context = prepared.stage_input.context
        using = self._table.track_request(
            pair.prefill,
            rank=pair.prefill_rank,
            prefix=prepared.prefill_prefix,
            work=prepared.work,
        )
        try:
            with using:
                context.record.prefix_tokens = using.matched
                prefilled = await self._stages.prefill(
                    self._transfer, pair, prepared.consumed, context
                )
        except ProxyError as error:
            loads = prepared.may_lack_state("prefill", loads_blocks=pair.earlier is not None)
            context.doubts.add(error, using, loads=loads)
            if not error.rejects_request:
                self._peers.forget_instance(pair.prefill)
            self._readbacks.record_result(pair, error)
            raise self._counted(error, pair.prefill, prepared) from error.__cause__
        context.doubts.settle(pair.prefill)
        self._peers.learn_facts(pair, prefilled.replied)
        self._readbacks.record_result(pair)
        return prefilled

    def _counted(
        self, error: ProxyError, instance: Instance, prepared: PreparedRequest
    ) -> ProxyError:
        """Return the final error of an attempt, after counting a death of its instance."""
        watched = prepared.stage_input.context.watched
        if not isinstance(error, UpstreamDied):
            return watched.final_error(error, instance)
        return self._fatal.after(error, instance, watched, prepared.encodings.local_identities)

    def _judging(
        self, instance: Instance, prepared: PreparedRequest
    ) -> Callable[[BaseException | None], None]:
        """Return a callback for the end of an opened answer, without a reference to the request."""
        watched = prepared.stage_input.context.watched
        encoded_here = prepared.encodings.local_identities

        def record_result(error: BaseException | None) -> None:
            if error is None and watched.engine_died:
                error = UpstreamDied("the engine died in its stream", stage="decode")
            if isinstance(error, UpstreamDied):
                self._fatal.after(error, instance, watched, encoded_here)
            elif error is None:
                self._fatal.record_survival(watched, encoded_here)

        return record_result


class Halves:
    """Prefill and decode of one attempt that hold its request at the same time.

    If one of them dies of the request, the other may die a moment later. Its death is counted only
    if its request is not cancelled before.
    """

    def __init__(self) -> None:
        self._ended = {"prefill": asyncio.Event(), "decode": asyncio.Event()}

    async def run(self, half: Literal["prefill", "decode"], work: Awaitable[T]) -> T:
        """Return the result of one half. Raise its death after the other half has ended too."""
        try:
            return await work
        except (UpstreamDied, SuspectedFatal):
            self._ended[half].set()
            other = self._ended["decode" if half == "prefill" else "prefill"]
            with suppress(TimeoutError):
                async with asyncio.timeout(DIES_WITHIN_S):
                    await other.wait()
            raise
        finally:
            self._ended[half].set()


def _close(opening: asyncio.Task[DecodeAnswer]) -> None:
    """Close an abandoned answer. Its instance is not blamed."""
    if _is_done(opening):
        opening.result().close(asyncio.CancelledError())


def _is_done(task: asyncio.Task[Any]) -> bool:
    """Return whether the task has a result."""
    return task.done() and not task.cancelled() and task.exception() is None
