"""Prefill and decode of one attempt, after its items are encoded."""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from epd.aio import end_tasks, errors_of
from epd.api.usage import Usage
from epd.conversations.turn import AnsweredTurn
from epd.encoder_cache.claims import Claim, end_claims
from epd.errors import ProxyError, SuspectedFatal, UpstreamDied, slug_of
from epd.request.attempt import Attempt
from epd.request.choices import Choices, Worth
from epd.request.kv_peers import PeerRegistry
from epd.request.kv_readback import Readbacks
from epd.request.releases import Releases
from epd.request.stages import Stages
from epd.routing.fatal import FatalRequests, Watched
from epd.routing.instances import Instance
from epd.routing.table import NO_WORK, InFlight, InstanceTable, Reservation
from epd.transfer import with_params
from epd.transfer.encoded import Prompt
from epd.transfer.kv import Handover, KVTransfer, Prefilled
from epd.upstream import Reply

if TYPE_CHECKING:
    from epd.spans import Span

DIES_WITHIN_S = 1.0
"""Time after one instance's death in which the other instance of the request is watched, in
seconds."""


@dataclass(slots=True, eq=False)
class DecodeAnswer:
    """Decode's answer, opened. It must be used as a context.

    It refers to no body: that of the request can be freed.

    Attributes:
        reply: head of the answer, and its body as it arrives.
        span: span of the request to decode, until the answer has been relayed; None without
            tracing.
        turn: the conversation turn; None for a request outside a conversation.
        usage: prefill's numbers for the client's answer; empty if decode prefilled.
        engine_died: whether the stream reported the death of its engine.
    """

    reply: Reply
    span: "Span | None"
    turn: AnsweredTurn | None
    usage: Usage
    _in_flight: InFlight
    _fatal: FatalRequests
    _watched: Watched
    _consumer_identities: Sequence[str]
    _consumer_claims: list[Claim]
    engine_died: bool = False

    def end_claims(self, error: BaseException | None = None) -> None:
        """End the claims of the items that decode encodes; without an error, it stores them."""
        if self._consumer_claims:
            end_claims(self._consumer_claims, entries_coming=error is None)

    def close(self, error: BaseException | None) -> None:
        """Close the answer; the next attempt of its request keeps the claims."""
        if self.span is not None:
            self.span.end_span(slug_of(error))
        self.reply.close()
        self._in_flight.end_request(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the answer, end the claims, and count the death of its instance."""
        self.end_claims(error)
        self.close(error)
        if error is None and self.engine_died:
            error = UpstreamDied("the engine died in its stream", stage="decode")
        watched, items = self._watched, self._consumer_identities
        if error is None:
            self._fatal.record_survival(watched, items)
        elif isinstance(error, ProxyError):
            self._fatal.count_death(error, self._in_flight.instance, watched, items)


@dataclass(frozen=True, slots=True, eq=False)
class PrefillDecodeRunner:
    """Runner of prefill and decode of an attempt."""

    _table: InstanceTable
    _choices: Choices
    _stages: Stages
    _transfer: KVTransfer
    _peers: PeerRegistry | None
    _readbacks: Readbacks
    _releases: Releases
    _fatal: FatalRequests

    async def choose_first(self, attempt: Attempt, worth: Worth | None = None) -> Reservation:
        """Choose the instance that computes the prompt: prefill, or decode alone.

        Without `worth`, all instances save the same.

        Raises:
            ProxyError: no instance is available, or the choice failed.
        """
        request = attempt.request
        if request.turn is not None:
            await self._readbacks.begin_turn(request.turn)
        if attempt.needs_prefill:
            instance = self._choices.choose_prefill(attempt, worth)
            balance = request.config.prefill_balance
        else:
            instance = self._choices.choose_decode(attempt, worth)
            balance = request.config.decode_balance
        return self._table.reserve_place(instance, prefix=attempt.prefix(balance))

    async def prepare(self, attempt: Attempt, first: Reservation) -> Handover:
        """Return what prefill and decode need to know of each other.

        Decode is chosen now if prefill has to know it.

        Raises:
            ProxyError: no instance is available, or a request to one failed.
        """
        request, prefill, earlier = attempt.request, first.instance, None
        transfer, peers = self._transfer, self._peers
        request_id = request.child_id() if attempt.resent else request.id
        if request.turn is not None:
            try:
                earlier = await self._readbacks.previous_params(request.turn, attempt, prefill)
            except UpstreamDied as error:
                raise self._final_error(attempt, prefill, error) from error.__cause__
        decode = None
        if transfer.eager:
            decode = self._choices.choose_decode(attempt)
        peer = None if peers is None else await peers.params_for(prefill, first.rank)
        concurrent = transfer.decode_concurrent(peer)
        return Handover(request_id, prefill, first.rank, decode, peer, earlier, concurrent)

    async def prefill(self, attempt: Attempt, handover: Handover) -> Prefilled:
        """Return prefill's result. If decode is chosen already, reserve its place meanwhile.

        Raises:
            ProxyError: the instance failed, or rejected the request.
        """
        request, prompt, decode = attempt.request, attempt.prompt, handover.decode
        in_flight = self._table.track_request(
            handover.prefill,
            rank=handover.prefill_rank,
            prefix=attempt.prefix(request.config.prefill_balance),
            work=prompt.work,
        )
        reads_back = handover.earlier is not None
        try:
            with in_flight, nullcontext() if decode is None else self._table.reserve_place(decode):
                request.record.add_prefix(in_flight.matched)
                prefilled = await self._stages.prefill(self._transfer, handover, prompt, request)
        except ProxyError as error:
            self._forget_peer(handover.prefill, error)
            if reads_back:
                self._readbacks.record_result(handover, error)
                prompt = prompt._replace(depends=True)
            raise self._judge(attempt, prompt, in_flight, error) from error.__cause__
        request.doubts.settle(handover.prefill)
        if self._peers is not None:
            self._peers.learn_facts(prefilled)
        if reads_back:
            self._readbacks.record_result(handover)
        return prefilled

    def choose_decode(
        self, attempt: Attempt, handover: Handover, prefilled: Prefilled | None = None
    ) -> Instance:
        """Return the decode instance; if none can be chosen, prefill's blocks are released.

        Raises:
            ProxyError: no instance is available.
        """
        if handover.decode is not None:
            return handover.decode
        try:
            return self._choices.choose_decode(attempt)
        except ProxyError as error:
            if prefilled is not None:
                body = with_params(attempt.prompt.body, prefilled.params)
                self._releases.release_unread(attempt, body, None, error)
            raise

    async def decode(
        self,
        attempt: Attempt,
        instance: Instance,
        rank: int | None = None,
        prefilled: Prefilled | None = None,
        prefill_task: asyncio.Task[Prefilled] | None = None,
    ) -> DecodeAnswer:
        """Return decode's answer, opened. Without a prefill, decode prefills the request.

        If the head of the answer does not come, prefill's blocks are released. `prefill_task` is
        the prefill if it runs at the same time.

        Raises:
            ProxyError: the instance failed, or rejected the request.
        """
        request, prompt = attempt.request, attempt.prompt
        request_id, work, turn, reply = request.id, prompt.work, None, None
        handover = None if prefilled is None else prefilled.handover
        if request.turn is not None:
            turn = self._readbacks.answered_turn(request.turn, attempt, instance, handover)
        if prefilled is not None:
            request_id, work = prefilled.handover.request_id, NO_WORK
            body = with_params(prompt.body, prefilled.params)
            if turn is not None and turn.basis is not None:
                body = {**body, "return_token_ids": True}
            # Decode loads blocks, and ignores the media.
            prompt = prompt._replace(body=body, depends=True, named=False)
        prefix = attempt.prefix(request.config.decode_balance)
        in_flight = self._table.track_request(
            instance, rank=rank, prefix=prefix, work=work
        ).begin_request()
        if prefilled is None:
            request.record.add_prefix(in_flight.matched)
        try:
            with request.record.time_stage("decode", instance.url) as stage:
                reply = await self._stages.decode(
                    instance, prompt, request, request_id, in_flight.rank, stage.span
                )
                always_whole = turn is not None and turn.capture is not None
                await self._stages.wait_beginning(reply, request, always_whole=always_whole)
        except BaseException as error:
            if reply is None and prefilled is not None and _has_blocks(prefill_task, error):
                self._releases.release_unread(attempt, prompt.body, instance, error)
            in_flight.end_request(error)
            if not isinstance(error, ProxyError):
                raise
            if handover is not None:
                self._forget_peer(handover.prefill, error)
            raise self._judge(attempt, prompt, in_flight, error) from error.__cause__
        request.record.wait_for("answer")
        in_flight.record_answer()
        request.doubts.settle(instance)
        return DecodeAnswer(
            reply,
            stage.span,
            turn,
            {} if prefilled is None else prefilled.usage,
            in_flight,
            self._fatal,
            request.watched,
            attempt.consumer_identities,
            attempt.consumer_claims,
        )

    async def prefill_and_decode(
        self, attempt: Attempt, handover: Handover, decode: Instance
    ) -> DecodeAnswer:
        """Decode while prefill runs. Decode's head may precede its tokens by a long time.

        Raises:
            ProxyError: the first failure of the two.
        """
        expected = Prefilled(handover, self._transfer.decode_params(handover, {}), {}, {})
        prefill_task = asyncio.create_task(self.prefill(attempt, handover))
        decode_task = asyncio.create_task(
            self.decode(attempt, decode, None, expected, prefill_task)
        )
        try:
            await wait_both(prefill_task, decode_task)
        except BaseException:
            if _has_result(decode_task):
                decode_task.result().close(asyncio.CancelledError())
            raise
        return replace(decode_task.result(), usage=prefill_task.result().usage)

    def _forget_peer(self, prefill: Instance, error: ProxyError) -> None:
        """Drop the facts about prefill's connector: it may have been replaced."""
        if self._peers is not None and not error.rejects_request:
            self._peers.forget_instance(prefill)

    def _judge(
        self,
        attempt: Attempt,
        prompt: Prompt,
        in_flight: InFlight,
        error: ProxyError,
    ) -> ProxyError:
        """Return the final error of a request to an instance, after judging the instance.

        Only the first 500 of a stage may mean that an entry or KV blocks are missing.
        """
        loads = prompt.depends and error.stage not in attempt.failures
        attempt.request.doubts.add(error, in_flight, loads=loads, names=prompt.named)
        return self._final_error(attempt, in_flight.instance, error)

    def _final_error(self, attempt: Attempt, instance: Instance, error: ProxyError) -> ProxyError:
        """Return the final error of an attempt, after counting a death of its instance."""
        watched, items = attempt.request.watched, attempt.consumer_identities
        return self._fatal.count_death(error, instance, watched, items)


async def wait_both(
    prefill_task: asyncio.Task[Any],
    decode_task: asyncio.Task[Any],
    dies_within_s: float = DIES_WITHIN_S,
) -> None:
    """Wait for prefill and decode of one attempt. At a failure, end the other one.

    If one of them dies of the request, the other may die a moment later, within `dies_within_s`
    seconds. Its death is counted only if its request is not cancelled before.

    Raises:
        ProxyError: a failure of one of them.
    """
    both = prefill_task, decode_task
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        if any(isinstance(error, UpstreamDied | SuspectedFatal) for error in errors_of(both)):
            await asyncio.wait(both, timeout=dies_within_s)
        errors = errors_of(both)
    finally:
        await end_tasks(both)
    if errors:
        # After the second death, the request is not sent again.
        final = max(errors, key=lambda error: isinstance(error, SuspectedFatal))
        raise final from final.__cause__


def _has_result(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _has_blocks(prefill_task: asyncio.Task[Prefilled] | None, error: BaseException) -> bool:
    """Return whether prefill has blocks when its decode ends in this error.

    A cancellation ends a prefill in progress too, which then releases them.
    """
    return prefill_task is None or (isinstance(error, ProxyError) and _has_result(prefill_task))
