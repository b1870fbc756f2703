"""Prefill and decode of one attempt, after its items are encoded."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from epd.aio import end_tasks, errors_of
from epd.api.usage import Usage
from epd.conversations.turn import Turn
from epd.errors import ProxyError, Stage, SuspectedFatal, UpstreamDied, slug_of
from epd.request.choices import Choices
from epd.request.kv_peers import PeerRegistry
from epd.request.kv_readback import Readbacks
from epd.request.recovery import Attempt
from epd.request.request import Request
from epd.request.stages import Stages
from epd.routing.fatal import FatalRequests
from epd.routing.instances import Instance
from epd.routing.prefix import NO_PREFIX, Prefix
from epd.routing.table import NO_WORK, InFlight, InstanceTable, Reservation
from epd.routing.watched import Watched
from epd.transfer import with_params
from epd.transfer.kv import Handover, KVTransfer
from epd.upstream import Reply

if TYPE_CHECKING:
    from epd.spans import Span

DIES_WITHIN_S = 1.0
"""Time after one instance's death in which the other instance of the request is watched, in
seconds."""


def needs_prefill(request: Request, attempt: Attempt) -> bool:
    """Return whether a prefill instance computes the prompt, and not decode itself."""
    planned = attempt.course.prefill and not attempt.without_prefill
    return planned and request.endpoint.can_prefill(request.body)


@dataclass(slots=True, eq=False)
class DecodeAnswer:
    """Decode's answer, opened. It must be closed, or used as a context.

    It refers to no body: that of the request can be freed.

    Attributes:
        reply: head of the answer, and its body as it arrives.
        span: span of the request to decode, until the answer has been relayed; None without
            tracing.
        turn: the conversation turn; None for a request outside a conversation.
        usage: prefill's numbers for the client's answer; None if decode prefilled.
        engine_died: whether the stream reported the death of its engine.
        claims: claims of the entries that decode is writing; None for none.
    """

    reply: Reply
    span: "Span | None"
    turn: Turn | None
    usage: Usage | None
    _using: InFlight
    _fatal: FatalRequests
    _watched: Watched
    _local_identities: Sequence[str]
    engine_died: bool = False
    claims: ExitStack | None = None

    def close(self, error: BaseException | None) -> None:
        """Close the answer, and judge its instance by the error."""
        if self.claims is not None:
            self.claims.__exit__(None, error, None)
        if self.span is not None:
            self.span.end_span(slug_of(error))
        self.reply.close()
        self._using.end_request(error)
        if error is None and self.engine_died:
            error = UpstreamDied("the engine died in its stream", stage="decode")
        watched, items = self._watched, self._local_identities
        if error is None:
            self._fatal.record_survival(watched, items)
        elif isinstance(error, ProxyError):
            self._fatal.final_error(error, self._using.instance, watched, items)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)


@dataclass(frozen=True, slots=True, eq=False)
class PrefillDecodeStages:
    """Runner of prefill and decode of an attempt."""

    _table: InstanceTable
    _choices: Choices
    _stages: Stages
    _transfer: KVTransfer
    _peers: PeerRegistry | None
    _readbacks: Readbacks
    _fatal: FatalRequests

    async def choose_first(self, request: Request, attempt: Attempt, prefix: Prefix) -> Reservation:
        """Choose the instance that computes the prompt: prefill, or decode alone.

        Raises:
            ProxyError: no instance is available, or the choice failed.
        """
        if request.turn is not None:
            await self._readbacks.begin_turn(request.turn)
        if needs_prefill(request, attempt):
            instance = self._choices.choose_prefill(request, attempt, prefix)
            return self._table.reserve_place(instance, prefix=_for_prefill(request, prefix))
        instance = self._choices.choose_decode(request, attempt, prefix)
        return self._table.reserve_place(instance, prefix=_for_decode(request, prefix))

    async def prepare(self, request: Request, attempt: Attempt, handover: Handover) -> bool:
        """Collect what prefill and decode need to know of each other.

        Return whether they run at the same time.

        Raises:
            ProxyError: no instance is available, or a request to one failed.
        """
        if request.turn is not None:
            try:
                handover.earlier = await self._readbacks.previous_params(
                    request, request.turn, attempt, handover.prefill
                )
            except UpstreamDied as error:
                raise self._final_error(request, attempt, handover.prefill, error) from (
                    error.__cause__
                )
        if self._transfer.eager:
            handover.decode = self._choices.choose_decode(
                request, attempt, attempt.prompt.prefix, handover.prefill
            )
        if self._peers is not None:
            handover.peer = await self._peers.params_for(handover)
        return self._transfer.decode_concurrent(handover)

    async def prefill(self, request: Request, attempt: Attempt, handover: Handover) -> None:
        """Send the request to prefill. If decode is chosen already, reserve its place.

        Raises:
            ProxyError: the instance failed, or rejected the request.
        """
        decode = handover.decode
        with nullcontext() if decode is None else self._table.reserve_place(decode):
            await self._prefill(request, attempt, handover)
        handover.prefilled = True

    async def decode(
        self, request: Request, attempt: Attempt, instance: Instance, rank: int | None = None
    ) -> DecodeAnswer:
        """Return decode's answer, opened. Without a handover, decode prefills the request.

        Raises:
            ProxyError: the instance failed, or rejected the request.
        """
        prompt, handover = attempt.prompt, attempt.handover
        work, prefill = prompt.work, None
        if handover is not None:
            work, prefill = NO_WORK, handover.prefill
            body = with_params(prompt.body, handover.params)
            if handover.prefilled and request.turn is not None and request.endpoint.tokenized:
                body = request.turn.with_tokens(body)
            prompt = prompt._replace(body=body)
        using = self._table.track_request(
            instance, rank=rank, prefix=_for_decode(request, prompt.prefix), work=work
        ).begin_request()
        if handover is None:
            request.record.add_prefix(using.matched)
        try:
            reply, span = await self._stages.decode(instance, prompt, request, using.rank, handover)
        except BaseException as error:
            using.end_request(error)
            if not isinstance(error, ProxyError):
                raise
            loads = _may_lack_state("decode", attempt, loads_blocks=handover is not None)
            names = prompt.named and handover is None
            request.doubts.add(error, using, loads=loads, names=names)
            if handover is not None:
                self._forget_peer(handover, error)
            raise self._final_error(request, attempt, instance, error) from error.__cause__
        using.record_answer()
        request.doubts.settle(instance)
        if request.turn is not None:
            request.turn.decode = instance.url
            request.turn.prefill = None if prefill is None else prefill.url
        return DecodeAnswer(
            reply,
            span,
            request.turn,
            None if handover is None else handover.usage,
            using,
            self._fatal,
            request.watched,
            attempt.local_identities,
        )

    async def prefill_and_decode(
        self, request: Request, attempt: Attempt, decode: Instance, handover: Handover
    ) -> DecodeAnswer:
        """Decode while prefill runs. Decode's head may precede its tokens by a long time.

        Raises:
            ProxyError: the first failure of the two.
        """
        handover.params = self._transfer.decode_params(handover, {})
        prefilling = asyncio.create_task(self._prefill(request, attempt, handover))
        decoding = asyncio.create_task(self.decode(request, attempt, decode))
        try:
            await wait_both(prefilling, decoding)
        except BaseException as error:
            handover.prefilled = isinstance(error, ProxyError) and _has_result(prefilling)
            if _has_result(decoding):  # the instance of an abandoned answer is not blamed
                decoding.result().close(asyncio.CancelledError())
            raise
        answer = decoding.result()
        answer.usage = handover.usage
        return answer

    async def _prefill(self, request: Request, attempt: Attempt, handover: Handover) -> None:
        instance, prompt = handover.prefill, attempt.prompt
        using = self._table.track_request(
            instance,
            rank=handover.prefill_rank,
            prefix=_for_prefill(request, prompt.prefix),
            work=prompt.work,
        )
        reads_back = handover.earlier is not None
        try:
            with using:
                request.record.add_prefix(using.matched)
                replied = await self._stages.prefill(self._transfer, handover, prompt, request)
        except ProxyError as error:
            loads = _may_lack_state("prefill", attempt, loads_blocks=reads_back)
            request.doubts.add(error, using, loads=loads, names=prompt.named)
            self._forget_peer(handover, error)
            if reads_back:
                self._readbacks.record_result(handover, error)
            raise self._final_error(request, attempt, instance, error) from error.__cause__
        request.doubts.settle(instance)
        if self._peers is not None:
            self._peers.learn_facts(handover, replied)
        if reads_back:
            self._readbacks.record_result(handover)

    def _forget_peer(self, handover: Handover, error: ProxyError) -> None:
        """Drop the facts about prefill's connector: it may have been replaced."""
        if self._peers is not None and not error.rejects_request:
            self._peers.forget_instance(handover.prefill)

    def _final_error(
        self, request: Request, attempt: Attempt, instance: Instance, error: ProxyError
    ) -> ProxyError:
        """Return the final error of an attempt, after counting a death of its instance."""
        items = attempt.local_identities
        return self._fatal.final_error(error, instance, request.watched, items)


def _for_prefill(request: Request, prefix: Prefix) -> Prefix:
    return prefix if request.config.prefill_balance == "content" else NO_PREFIX


def _for_decode(request: Request, prefix: Prefix) -> Prefix:
    return prefix if request.config.decode_balance == "content" else NO_PREFIX


def _may_lack_state(stage: Stage, attempt: Attempt, *, loads_blocks: bool) -> bool:
    """Return whether a 500 of this stage may mean that an entry or KV blocks are missing.

    Only the first 500 of a stage may.
    """
    return (attempt.prompt.depends or loads_blocks) and stage not in attempt.failures


async def wait_both(prefilling: asyncio.Task[None], decoding: asyncio.Task[Any]) -> None:
    """Wait for prefill and decode of one attempt. At a failure, end the other one.

    If one of them dies of the request, the other may die a moment later. Its death is counted only
    if its request is not cancelled before.

    Raises:
        ProxyError: a failure of one of them.
    """
    both = prefilling, decoding
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        if any(isinstance(error, UpstreamDied | SuspectedFatal) for error in errors_of(both)):
            await asyncio.wait(both, timeout=DIES_WITHIN_S)
        errors = errors_of(both)
    finally:
        await end_tasks(both)
    if errors:
        # After the second death, the request is not sent again.
        final = max(errors, key=lambda error: isinstance(error, SuspectedFatal))
        raise final from final.__cause__


def _has_result(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
