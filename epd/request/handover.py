"""From prefill to decode: an attempt of a request, once its items are encoded."""

import asyncio
from contextlib import AsyncExitStack, nullcontext
from http import HTTPStatus
from types import TracebackType
from typing import Any

from epd.bodies.items import Body
from epd.config import ProxyConfig
from epd.errors import BadRequest, NoInstance, ProxyError, UpstreamRejected
from epd.http.reply import Reply
from epd.request.attempts import Attempts
from epd.request.context import RequestContext
from epd.request.decoders import Decoders
from epd.request.peers import Peers
from epd.request.readbacks import Readbacks
from epd.request.releases import Releases
from epd.request.stages import Decoding, Prefilled, Stages
from epd.routing.balance import Choice
from epd.routing.instances import CONSUMERS, Instance, Role
from epd.routing.table import InstanceTable
from epd.routing.use import Place, Use
from epd.transfer.kv import KVTransfer, Pair
from epd.transfer.params import with_params


class Answer:
    """Decode's, and what it keeps until it has been relayed."""

    __slots__ = ("_decoding", "_reply", "_using")

    def __init__(self, using: Use, decoding: Decoding) -> None:
        self._using = using
        self._decoding = decoding

    async def open(self) -> None:
        """Wait for its head; afterwards, the context has to be entered.

        Raises:
            ProxyError: the instance failed, or refused the request.
        """
        self._using.__enter__()
        try:
            self._reply = await self._decoding.__aenter__()
        except BaseException as error:
            self._using.__exit__(type(error), error, error.__traceback__)
            raise
        self._using.answered()

    async def __aenter__(self) -> Reply:
        """Read it."""
        return self._reply

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it, and judge by its end who sent it."""
        try:
            await self._decoding.__aexit__(kind, error, trace)
        finally:
            self._using.__exit__(kind, error, trace)


class Handovers:
    """Has attempts prefilled, where prefill has a part in them, and decoded."""

    def __init__(  # noqa: PLR0913, PLR0917 - whom an attempt meets
        self,
        table: InstanceTable,
        stages: Stages,
        transfer: KVTransfer,
        peers: Peers,
        decoders: Decoders,
        releases: Releases,
        readbacks: Readbacks,
        config: ProxyConfig,
    ) -> None:
        self._table = table
        self._stages = stages
        self._transfer = transfer
        self._peers = peers
        self._decoders = decoders
        self._releases = releases
        self._readbacks = readbacks
        self._prefills = Choice(table, lambda: config.prefill_balance, Role.PREFILL)

    def other_prefills(self, attempts: Attempts) -> bool:
        """Whether there is a prefill instance that was not tried, and may be."""
        return attempts.course.prefill_url is None and self._prefills.others(attempts.prefills)

    async def consumer(
        self, attempts: Attempts, body: Body, context: RequestContext
    ) -> Place | None:
        """Who will prefill a request, and with what data-parallel rank, for `answer` to go to.

        Returns:
            None where that is a decode instance alone, which takes no encoder outputs.

        Raises:
            NoInstance: there is nobody.
        """
        await self._readbacks.begin(context)
        if self._goes_to_prefill(attempts, body, context):
            return self._table.place(self._prefill(attempts, context))
        if not self._table.has(Role.PREFILL_DECODE):
            return None  # whoever that is takes none, and is chosen when it is asked
        decode = await self._decoders.pick(attempts, context)
        if decode.role in CONSUMERS:
            return self._table.place(decode)
        attempts.decode = decode  # a picker is asked once
        return None

    async def answer(self, attempts: Attempts, context: RequestContext) -> Answer:
        """The decode instance's answer, opened.

        Raises:
            ProxyError: an instance failed, or refused the request.
        """
        sent, course, consumer = attempts.sent.body, attempts.course, attempts.consumer
        attempts.prefilled = False
        await self._readbacks.begin(context)
        if not self._goes_to_prefill(attempts, sent, context):
            return await self._decoded(attempts, context, sent)
        # What connectors remember of an attempt that failed must not be taken for the next one.
        again = attempts.prefills or attempts.reads_back
        request_id = context.child_id() if again else context.request_id
        prefill = consumer.instance if consumer else self._prefill(attempts, context)
        attempts.prefills.append(prefill)
        earlier = await self._readbacks.earlier(attempts, prefill, context)
        alone = attempts.alone("prefill")
        using = self._table.using(prefill, alone=alone, promised=consumer)
        pair = Pair(request_id, prefill, using.rank, earlier=earlier)
        if course.decode_choice == "early" or self._transfer.eager:
            pair = pair._replace(decode=await self._decoders.pick(attempts, context, prefill))
        pair = pair._replace(peer=await self._peers.of(pair))
        if self._transfer.concurrent(pair):
            return await self._at_once(using, pair, attempts, context)
        with nullcontext() if pair.decode is None else self._table.place(pair.decode):
            prefilled = await self._prefilled(using, pair, sent, context)
        return await self._in_turn(pair, prefilled, attempts, context)

    def _prefill(self, attempts: Attempts, context: RequestContext) -> Instance:
        url = attempts.course.prefill_url
        if url is None:
            prefers = None if context.turn is None else context.turn.prefers_prefill
            return self._prefills.best(attempts.prefills, session=context.session, prefer=prefers)
        if (local := self._table.find(url, Role.PREFILL)) is None:
            raise NoInstance(
                "the prefill instance beside the proxy takes no part",
                slug="no_prefill",
                stage="prefill",
            )
        return local

    def _goes_to_prefill(self, attempts: Attempts, body: Body, context: RequestContext) -> bool:
        wanted = attempts.course.prefill and not attempts.without_prefill
        return wanted and context.endpoint.prefills(body)

    async def _prefilled(
        self,
        using: Use,
        pair: Pair,
        sent: Body,
        context: RequestContext,
    ) -> Prefilled:
        earlier = pair.earlier
        try:
            with using:
                prefilled = await self._stages.prefill(self._transfer, pair, sent, context)
        except ProxyError as error:
            if not _is_clients(error):
                self._peers.forget(pair.prefill)
            if earlier is not None:
                self._readbacks.ended(pair, earlier, error)
            raise
        self._peers.learn(pair, prefilled.replied)
        if earlier is not None:
            self._readbacks.ended(pair, earlier)
        return prefilled

    async def _in_turn(
        self, pair: Pair, prefilled: Prefilled, attempts: Attempts, context: RequestContext
    ) -> Answer:
        """Decode, now that prefill has answered."""
        sent = with_params(attempts.sent.body, prefilled.params)
        if context.turn is not None and context.endpoint.tokenized:
            sent = context.turn.asking(sent)
        attempts.prefilled = True
        try:
            return await self._decoded(attempts, context, sent, pair)
        except BaseException as error:
            self._release(attempts, prefilled, error, context)
            raise

    async def _at_once(
        self, using: Use, pair: Pair, attempts: Attempts, context: RequestContext
    ) -> Answer:
        """Decode while prefill runs. Decode's head may come long before a token: both count."""
        body = attempts.sent.body
        sent = with_params(body, self._transfer.decode_params(pair, {}))
        attempts.prefilled = True
        tried = len(attempts.decodes)
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.TaskGroup() as group:
                    prefilling = group.create_task(self._prefilled(using, pair, body, context))
                    opening = group.create_task(self._decoded(attempts, context, sent, pair))
                    stack.push_async_callback(_closed, opening)
            except ExceptionGroup as failed:
                first = failed.exceptions[0]
                if isinstance(first, ProxyError) and first.stage == "prefill":
                    del attempts.decodes[tried:]  # it was well
                elif _is_done(prefilling):
                    self._release(attempts, prefilling.result(), first, context)
                raise first from first.__cause__
            stack.pop_all()
        return opening.result()

    async def _decoded(
        self, attempts: Attempts, context: RequestContext, body: Body, pair: Pair | None = None
    ) -> Answer:
        """Decode's answer, opened.

        Args:
            attempts: the request's.
            context: the request's.
            body: what decode is sent.
            pair: who has prefilled; None: nobody.
        """
        consumer = attempts.consumer if pair is None else None
        instance = consumer.instance if consumer else (pair and pair.decode) or attempts.decode
        attempts.decode = None
        if instance is None:
            prefill = None if pair is None else pair.prefill
            instance = await self._decoders.pick(attempts, context, prefill)
        if pair is None and self._transfer.needed and instance.role is Role.DECODE:
            raise BadRequest(
                "the request cannot be prefilled apart, and its decode instance does nothing else",
                slug="prefill_needed",
            )
        attempts.decodes.append(instance)
        alone = attempts.alone("decode")
        using = self._table.using(instance, alone=alone, promised=consumer)
        request_id = None if pair is None else self._transfer.request_id(pair)
        decoding = self._stages.decode(instance, body, context, using.rank, request_id)
        answer = Answer(using, decoding)
        try:
            await answer.open()
        except ProxyError as error:
            if pair is not None and not _is_clients(error):
                self._peers.forget(pair.prefill)
            raise
        if context.turn is not None:
            context.turn.decode = instance.url
            context.turn.prefill = None if pair is None else pair.prefill.url
        return answer

    def _release(
        self,
        attempts: Attempts,
        prefilled: Prefilled,
        error: BaseException,
        context: RequestContext,
    ) -> None:
        """Have prefill told, if it has to be, that decode has failed and will not come."""
        if not self._transfer.released or prefilled.params is None or _was_begun(error):
            return
        sent, tried = with_params(attempts.sent.body, prefilled.params), attempts.decodes
        # Who had it, or another if that failed.
        told = tried[-1] if tried else None
        if isinstance(error, ProxyError) or told is None:
            told = self._decoders.another(tried) or told
        if told is not None:
            self._releases.begin(told, sent, context)


async def _closed(opening: asyncio.Task[Answer]) -> None:
    """Close an answer that has come, and that nobody waits for; who sent it was well."""
    if _is_done(opening):
        await opening.result().__aexit__(asyncio.CancelledError, asyncio.CancelledError(), None)


def _is_done(task: asyncio.Task[Any]) -> bool:
    """Whether it has a result."""
    return task.done() and not task.cancelled() and task.exception() is None


def _was_begun(error: BaseException) -> bool:
    """Whether decode's engine has had the request, and has told prefill itself.

    What is refused is refused before, and a 4xx too: prefill is sent less than decode is.
    """
    return isinstance(error, ProxyError) and error.answered == HTTPStatus.INTERNAL_SERVER_ERROR


def _is_clients(error: ProxyError) -> bool:
    """Whether a request was refused for what it is, which says nothing of instances."""
    return isinstance(error, UpstreamRejected) and error.status < HTTPStatus.INTERNAL_SERVER_ERROR
