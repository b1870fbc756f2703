"""From prefill to decode: an attempt of a request, once its items are encoded."""

import asyncio
from collections.abc import Coroutine
from http import HTTPStatus
from types import TracebackType
from typing import Any

from epd.bodies.items import Body
from epd.config import ProxyConfig
from epd.errors import ProxyError
from epd.http.upstream import Reply
from epd.request.attempts import Attempts
from epd.request.context import RequestContext
from epd.request.decoders import Decoders
from epd.request.peers import Peers
from epd.request.releases import Releases
from epd.request.stages import Decoding, Prefilled, Stages
from epd.routing.balance import Choice
from epd.routing.instances import Instance, InstanceTable, Role
from epd.routing.use import Use
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
        config: ProxyConfig,
    ) -> None:
        self._table = table
        self._stages = stages
        self._transfer = transfer
        self._peers = peers
        self._decoders = decoders
        self._releases = releases
        self._prefills = Choice(table, lambda: config.prefill_balance, Role.PREFILL)

    def other_prefills(self, attempts: Attempts) -> bool:
        """Whether there is a prefill instance that was not tried."""
        return self._prefills.others(attempts.prefills)

    async def answer(self, attempts: Attempts, context: RequestContext) -> Answer:
        """The decode instance's answer, opened.

        Raises:
            ProxyError: an instance failed, or refused the request.
        """
        sent, course = attempts.sent.body, attempts.course
        attempts.prefilled = False
        if attempts.without_prefill or not course.prefill or not context.endpoint.prefills(sent):
            return await self._decoded(attempts, context, sent)
        prefill = self._prefills.best(attempts.prefills, session=context.session)
        attempts.prefills.append(prefill)
        using = self._table.using(prefill, alone=attempts.alone("prefill"))
        pair = Pair(context.request_id, prefill, using.rank)
        if course.eager or self._transfer.eager:
            pair = pair._replace(
                decode=await self._decoders.pick(course, context, attempts.decodes)
            )
        pair = pair._replace(peer=await self._peers.of(prefill))
        prefilling = self._prefilled(using, pair, sent, context)
        if self._transfer.concurrent(pair):
            return await self._at_once(pair, prefilling, attempts, context)
        return await self._in_turn(pair, await prefilling, attempts, context)

    async def _prefilled(
        self, using: Use, pair: Pair, sent: Body, context: RequestContext
    ) -> Prefilled:
        try:
            with using:
                prefilled = await self._stages.prefill(self._transfer, pair, sent, context)
        except ProxyError:
            self._peers.forget(pair.prefill)
            raise
        self._peers.learn(pair.prefill, prefilled.replied)
        return prefilled

    async def _in_turn(
        self, pair: Pair, prefilled: Prefilled, attempts: Attempts, context: RequestContext
    ) -> Answer:
        """Decode, now that prefill has answered."""
        sent = with_params(attempts.sent.body, prefilled.params)
        attempts.prefilled = True
        try:
            return await self._decoded(attempts, context, sent, pair)
        except BaseException as error:
            if self._transfer.released and not _was_begun(error):
                self._releases.begin(self._releaser(attempts, error), sent, context)
            raise

    async def _at_once(
        self,
        pair: Pair,
        prefilling: Coroutine[Any, Any, Prefilled],
        attempts: Attempts,
        context: RequestContext,
    ) -> Answer:
        """Decode while prefill runs. Decode's head may come long before a token: both count."""
        sent = with_params(attempts.sent.body, self._transfer.decode_params(pair, {}))
        attempts.prefilled = True
        tried = len(attempts.decodes)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(prefilling)
                opening = group.create_task(self._decoded(attempts, context, sent, pair))
        except (ExceptionGroup, asyncio.CancelledError) as failed:
            first = failed.exceptions[0] if isinstance(failed, ExceptionGroup) else failed
            if not opening.cancelled() and opening.exception() is None:
                await opening.result().__aexit__(type(first), first, first.__traceback__)
            if isinstance(first, ProxyError) and first.stage == "prefill":
                del attempts.decodes[tried:]  # it was well
            raise first from first.__cause__
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
        instance = None if pair is None else pair.decode
        if instance is None:
            instance = await self._decoders.pick(attempts.course, context, attempts.decodes)
        attempts.decodes.append(instance)
        using = self._table.using(instance, alone=attempts.alone("decode"))
        request_id = None if pair is None else self._transfer.request_id(pair)
        decoding = self._stages.decode(instance, body, context, using.rank, request_id)
        answer = Answer(using, decoding)
        try:
            await answer.open()
        except ProxyError:
            if pair is not None:
                self._peers.forget(pair.prefill)
            raise
        return answer

    def _releaser(self, attempts: Attempts, error: BaseException) -> Instance:
        """Who is told that a prefill is not wanted: who had it, or another if that failed."""
        failed = isinstance(error, ProxyError) and self._decoders.others(
            attempts.course, attempts.decodes
        )
        return self._decoders.another(attempts.decodes) if failed else attempts.decodes[-1]


def _was_begun(error: BaseException) -> bool:
    """Whether decode's engine has had the request, and has told prefill itself.

    What is refused is refused before, and a 4xx too: prefill is sent less than decode is.
    """
    return isinstance(error, ProxyError) and error.answered == HTTPStatus.INTERNAL_SERVER_ERROR
