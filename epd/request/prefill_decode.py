"""Prefill and decode of one attempt, after its items are encoded."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, nullcontext, suppress
from types import TracebackType
from typing import Any, Literal, TypeVar

from epd.aio import StrictTaskGroup
from epd.api.items import Body
from epd.errors import NoInstance, ProxyError, SuspectedFatal, UpstreamDied, slug_of
from epd.request.attempts import Sending, Targets
from epd.request.kv_peers import PeerRegistry, Releases
from epd.request.kv_readback import Readbacks
from epd.request.stages import Opened, Prefilled, Stages
from epd.request.targets import Decoders
from epd.routing.balance import Choice
from epd.routing.fatal import FatalRequests
from epd.routing.instances import CONSUMERS, Instance, Role
from epd.routing.table import NO_WORK, InFlight, InstanceTable
from epd.transfer import with_params
from epd.transfer.kv import KVTransfer, Pair
from epd.upstream import Reply

T = TypeVar("T")

DIES_WITHIN_S = 1.0
"""Time after one instance's death in which the other instance of the request is watched, in
seconds."""


class DecodeAnswer:
    """Decode's answer, as `Stages.decode` opened it. It must be closed, or used as a context."""

    __slots__ = ("_ended", "_opened", "_using")

    def __init__(
        self, opened: Opened, using: InFlight, ended: Callable[[BaseException | None], None]
    ) -> None:
        """Keep the resources of an answer until it has been relayed.

        Args:
            opened: the answer.
            using: the request's place at its instance, already begun.
            ended: callback for the end of the answer, with its error or None.
        """
        self._opened = opened
        self._using = using
        self._ended = ended

    def close(self, error: BaseException | None) -> None:
        """Close the answer, and judge its instance by the error."""
        if self._opened.span is not None:
            self._opened.span.end_span(slug_of(error))
        self._opened.reply.close()
        self._using.end_request(error)
        self._ended(error)

    def __enter__(self) -> Reply:
        return self._opened.reply

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)


class PrefillDecodeStages:
    """Runner of prefill and decode of an attempt, after its encode."""

    def __init__(  # noqa: PLR0913, PLR0917 - its collaborators
        self,
        table: InstanceTable,
        stages: Stages,
        transfer: KVTransfer,
        peers: PeerRegistry,
        decoders: Decoders,
        releases: Releases,
        readbacks: Readbacks,
        fatal: FatalRequests,
    ) -> None:
        self._fatal = fatal
        self._table = table
        self._stages = stages
        self._transfer = transfer
        self._peers = peers
        self._decoders = decoders
        self._releases = releases
        self._readbacks = readbacks
        self._prefills = Choice(table, Role.PREFILL)

    def other_prefills(self, sending: Sending) -> bool:
        """Return whether there is an eligible prefill instance that has not had the request."""
        attempt, tried = sending.attempt, sending.attempt.avoided_prefills
        if sending.prefill is not None:
            tried = (*tried, sending.prefill.instance)
        return attempt.course.prefill_url is None and self._prefills.has_untried(tried)

    async def choose_targets(self, sending: Sending, body: Body) -> Targets:
        """Choose the consumer of a request, with its data-parallel rank, before the encode.

        Raises:
            NoInstance: no instance is available.
        """
        await self._readbacks.begin_turn(sending.context)
        if self._needs_prefill(sending, body):
            prefill = self._prefill_instance(sending)
            return Targets(self._table.reserve_place(prefill, prefix=sending.prefill_prefix))
        if not self._table.has(Role.PREFILL_DECODE):
            return Targets()  # a decode instance loads no outputs, and is chosen later
        prefix = sending.decode_prefix
        decode = await self._decoders.pick_instance(sending.attempt, sending.context, prefix=prefix)
        if decode.role in CONSUMERS:
            return Targets(self._table.reserve_place(decode, prefix=prefix))
        return Targets(decode=decode)  # keep the choice: a picker is called only once

    async def choose_pair(self, sending: Sending) -> Pair | None:
        """Choose the prefill instance, and collect what it and decode need about each other.

        Returns:
            The pair; None if decode serves the request alone.

        Raises:
            ProxyError: no instance is available, or a request to one failed.
        """
        attempt, context = sending.attempt, sending.context
        await self._readbacks.begin_turn(context)
        if not self._needs_prefill(sending, sending.prompt.body):
            return None
        request_id = context.child_id() if attempt.resent else context.request_id
        consumer = sending.targets.consumer
        prefill = consumer.instance if consumer else self._prefill_instance(sending)
        prefix = sending.prefill_prefix
        sending.prefill = self._table.reserve_place(prefill, consumer, prefix=prefix)
        try:
            earlier = await self._readbacks.previous_params(sending, prefill)
        except UpstreamDied as error:
            raise self._counted(error, prefill, sending) from error.__cause__
        sending.reads_back = earlier is not None
        pair = Pair(request_id, prefill, sending.prefill.rank, earlier=earlier)
        if attempt.course.decode_choice == "early" or self._transfer.eager:
            pair = pair._replace(
                decode=await self._decoders.pick_instance(
                    attempt, context, prefill, prefix=sending.decode_prefix
                )
            )
        return pair._replace(peer=await self._peers.params_for(pair))

    def at_once(self, pair: Pair) -> bool:
        """Return whether prefill and decode of this pair run at the same time."""
        return self._transfer.decode_concurrent(pair)

    async def prefill(self, sending: Sending, pair: Pair) -> Prefilled:
        """Send the request to prefill. If decode is chosen already, count it as its load.

        Raises:
            ProxyError: the instance failed, or rejected the request.
        """
        with nullcontext() if pair.decode is None else self._table.reserve_place(pair.decode):
            return await self._prefilled(sending, pair)

    async def decode_prefilled(
        self, sending: Sending, pair: Pair, prefilled: Prefilled
    ) -> DecodeAnswer:
        """Return the answer of decode, which reads the blocks of a completed prefill.

        Raises:
            ProxyError: the instance failed, or rejected the request.
        """
        context = sending.context
        body = with_params(sending.prompt.body, prefilled.params)
        if context.turn is not None and context.endpoint.tokenized:
            body = context.turn.with_tokens(body)
        sending.prefilled = True
        try:
            return await self.decode(sending, body, pair)
        except BaseException as error:
            self._release(sending, prefilled, error)
            raise

    async def prefill_and_decode(self, sending: Sending, pair: Pair) -> DecodeAnswer:
        """Decode while prefill runs. Decode's head may precede its tokens by a long time.

        Raises:
            ProxyError: the first failure of the two.
        """
        body = with_params(sending.prompt.body, self._transfer.decode_params(pair, {}))
        sending.prefilled = True
        halves = Halves()
        with ExitStack() as stack:
            try:
                async with StrictTaskGroup() as group:
                    prefill = self._prefilled(sending, pair)
                    prefilling = group.create_task(halves.run("prefill", prefill))
                    decode = self.decode(sending, body, pair)
                    opening = group.create_task(halves.run("decode", decode))
                    stack.callback(_close, opening)
                    await asyncio.wait((prefilling, opening))
            except ExceptionGroup as failed:
                first = failed.exceptions[0]
                if isinstance(first, ProxyError) and first.stage == "prefill":
                    sending.decode = None  # decode did not fail
                elif _is_done(prefilling):
                    self._release(sending, prefilling.result(), first)
                raise first from first.__cause__
            stack.pop_all()
        return opening.result()

    def _prefill_instance(self, sending: Sending) -> Instance:
        url, context = sending.attempt.course.prefill_url, sending.context
        if url is None:
            prefers = None if context.turn is None else context.turn.prefers_prefill
            tried = sending.attempt.avoided_prefills
            balance = context.config.prefill_balance
            return self._prefills.best_instance(
                tried,
                balance=balance,
                session=context.session,
                prefix=sending.prefill_prefix,
                prefer=prefers,
            )
        if (local := self._table.find_instance(url, Role.PREFILL)) is None:
            raise NoInstance(
                "the prefill instance beside the proxy is not in the instance table; register it",
                slug="no_prefill",
                stage="prefill",
            )
        return local

    def _needs_prefill(self, sending: Sending, body: Body) -> bool:
        attempt = sending.attempt
        wanted = attempt.course.prefill and not attempt.without_prefill
        return wanted and sending.context.endpoint.can_prefill(body)

    async def _prefilled(self, sending: Sending, pair: Pair) -> Prefilled:
        blames = sending.blames_instance("prefill")
        try:
            with self._table.track_request(
                pair.prefill,
                alone=blames,
                promised=sending.prefill,
                prefix=sending.prefill_prefix,
                work=sending.work,
            ) as using:
                sending.context.record.prefix_tokens = using.matched
                prefilled = await self._stages.prefill(
                    self._transfer, pair, sending.prompt, sending.context
                )
        except ProxyError as error:
            if not error.rejects_request:
                self._peers.forget_instance(pair.prefill)
            if pair.earlier is not None:
                self._readbacks.record_result(pair, pair.earlier, error)
            raise self._counted(error, pair.prefill, sending) from error.__cause__
        self._peers.learn_facts(pair, prefilled.replied)
        if pair.earlier is not None:
            self._readbacks.record_result(pair, pair.earlier)
        return prefilled

    async def decode(self, sending: Sending, body: Body, pair: Pair | None = None) -> DecodeAnswer:
        """Return decode's answer, opened.

        Args:
            sending: the attempt.
            body: body for decode.
            pair: the prefill of the request; None if decode prefills it.

        Raises:
            ProxyError: the instance failed, or rejected the request.
        """
        context = sending.context
        consumer = sending.targets.consumer if pair is None else None
        prefill = None if pair is None else pair.prefill
        instance = consumer.instance if consumer else sending.targets.decode
        if pair is not None and pair.decode is not None:
            instance = pair.decode
        if instance is None:
            instance = await self._decoders.pick_instance(
                sending.attempt, context, prefill, prefix=sending.decode_prefix
            )
        sending.decode = instance
        request_id = None if pair is None else pair.request_id
        blames = sending.blames_instance("decode")
        using = self._table.track_request(
            instance,
            alone=blames,
            promised=consumer,
            prefix=sending.decode_prefix,
            work=sending.work if pair is None else NO_WORK,
        ).begin_request()
        if pair is None:
            context.record.prefix_tokens = using.matched
        sent = sending.prompt
        if body is not sent.body:
            sent = sent._replace(body=body)
        try:
            opened = await self._stages.decode(
                instance, sent, context, using.rank, request_id, on_head=sending.record_answer
            )
        except BaseException as error:
            using.end_request(error)
            if not isinstance(error, ProxyError):
                raise
            if prefill is not None and not error.rejects_request:
                self._peers.forget_instance(prefill)
            raise self._counted(error, instance, sending) from error.__cause__
        using.record_answer()
        if context.turn is not None:
            context.turn.decode = instance.url
            context.turn.prefill = None if prefill is None else prefill.url
        return DecodeAnswer(opened, using, self._judging(instance, sending))

    def _counted(self, error: ProxyError, instance: Instance, sending: Sending) -> ProxyError:
        """Return the final error of an attempt, after counting a death of its instance."""
        if not isinstance(error, UpstreamDied):
            return error
        watched, keys = sending.context.watched, sending.encodings.local_keys
        return self._fatal.after(error, instance, watched, keys)

    def _judging(
        self, instance: Instance, sending: Sending
    ) -> Callable[[BaseException | None], None]:
        """Return a callback for the end of an opened answer, without a reference to the request."""
        watched, local_keys = sending.context.watched, sending.encodings.local_keys

        def record_result(error: BaseException | None) -> None:
            if isinstance(error, UpstreamDied):
                self._fatal.after(error, instance, watched, local_keys)
            elif error is None and watched.engine_died:
                told = UpstreamDied("the engine died in its stream", stage="decode")
                self._fatal.after(told, instance, watched, local_keys)
            elif error is None:
                self._fatal.record_survival(watched, local_keys)

        return record_result

    def _release(self, sending: Sending, prefilled: Prefilled, error: BaseException) -> None:
        """Ask decode to release the KV blocks of a prefill after its decode failed.

        A release is skipped in three cases. If a decode instance may have died of the request, no
        other one receives it, and the blocks stay until their lease expires. After a 500, decode's
        engine has notified prefill itself (after a 4xx it has not, because it rejected the request
        earlier). If decode has sent the head of its answer, aborting it notifies prefill, and a
        release would then read blocks that prefill has freed.
        """
        failure = error if isinstance(error, ProxyError) else None
        told = sending.accepted or (failure is not None and failure.engine_failed)
        fatal = (failure is not None and failure.died) or sending.context.watched.deaths is not None
        if not self._transfer.released or prefilled.params is None or told or fatal:
            return
        # The instance that received the request, or another one if that failed.
        instance = sending.decodes[-1] if sending.decodes else None
        if failure is not None or instance is None:
            instance = self._decoders.untried_instance(sending.decodes, sending.context) or instance
        if instance is not None:
            body = with_params(sending.prompt.body, prefilled.params)
            self._releases.begin_release(instance, body, sending.context)


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
