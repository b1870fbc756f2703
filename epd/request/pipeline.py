"""One request: encode, prefill where there is one, decode; tried again while nobody has seen it."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from http import HTTPStatus

from epd.bodies.items import Body, MMItem, at_most, check_mm_kwargs
from epd.bodies.prompt import prompt_tokens
from epd.cache.encoder_cache import EncoderCache
from epd.cache.keys import Keys
from epd.config import ProxyConfig
from epd.errors import NoInstance, ProxyError, UpstreamTimeout, UpstreamUnreachable
from epd.media.fetch import MediaFetcher
from epd.media.parts import inline_bytes
from epd.policies.course import Course, Facts
from epd.request.attempts import Attempts
from epd.request.context import RequestContext
from epd.request.decoders import Decoders
from epd.request.encoding import Encoder, raw_items
from epd.request.handover import Answer, Handovers
from epd.request.readbacks import may_be_blocks
from epd.request.stages import Stages
from epd.routing.instances import ANSWERING, Role
from epd.routing.retries import Retries, is_instances_fault, retry_delay_s
from epd.routing.table import InstanceTable
from epd.transfer.ec import ECTransfer
from epd.transfer.encoded import EncodedItem, consumer_body, metadata_uuids

MAX_PREFILLS = 2
"""Prefill instances that a request is sent to, before decode has to do without."""

MAX_DECODES = 2
"""Decode instances that a request is sent to."""

MAX_ATTEMPTS = 1 + MAX_PREFILLS + MAX_DECODES
"""With one prefill that could not read what an earlier turn has left."""


class Pipeline:
    """Carries requests through the stages."""

    def __init__(  # noqa: PLR0913, PLR0917 - what a request meets on its way
        self,
        table: InstanceTable,
        stages: Stages,
        media: MediaFetcher,
        cache: EncoderCache | None,
        transfer: ECTransfer,
        handovers: Handovers,
        decoders: Decoders,
        coordinate: Callable[[Facts], tuple[str, Course] | None],
        config: ProxyConfig,
    ) -> None:
        self._table = table
        self._media = media
        self._handovers = handovers
        self._decoders = decoders
        self._transfer = transfer
        self._encoder = Encoder(stages, table, cache, transfer, config)
        self._keys = Keys(cache, config)
        self._config = config
        self._retries = Retries()
        self._coordinate = coordinate

    async def run(self, body: Body, context: RequestContext) -> Answer:
        """The decode instance's answer, its head read, its status 2xx: a context, to be entered.

        Leaving the context, by cancellation too, closes whatever is open upstream.

        Raises:
            BadRequest: the request cannot be served as it is.
            ProxyError: a stage failed.
        """
        items = self._items(body, context)
        facts = self._facts(body, items, context)
        course = self._decoders.settled(self._course(facts, context), context)
        body, uuids = await self._keyed(body, items, context)
        attempts = Attempts(course, facts)

        async def attempt() -> Answer:
            self._do_without_prefill(attempts)
            if uuids and self._transfer.pushed:
                attempts.consumer = await self._handovers.consumer(attempts, body, context)
            with attempts.consumer or nullcontext():
                await self._prepare(attempts, body, uuids, context)
            return await self._handovers.answer(attempts, context)

        def again(error: ProxyError) -> float | None:
            delay_s = self._next(attempts, error)
            context.record.retries += delay_s is not None
            return delay_s

        return await self._retries.run(attempt, tries=MAX_ATTEMPTS, again=again)

    async def encode(self, body: Body, context: RequestContext) -> list[EncodedItem]:
        """Have the items of a request encoded that asks for nothing else, and remember them.

        Raises:
            BadRequest: an item cannot be encoded as it is.
            ProxyError: the first item that failed.
        """
        body, uuids = await self._keyed(body, self._items(body, context), context)
        encoded = await self._encoder.encode(body, uuids, context)
        await self._keys.remember(body, encoded, context.tenant)
        return encoded

    async def forget(self, uuid: str, model: str | None, context: RequestContext) -> None:
        """Forget what a client calls so: see `Keys.forget`."""
        await self._keys.forget(uuid, model, context.tenant)

    def _items(self, body: Body, context: RequestContext) -> tuple[MMItem, ...]:
        """The media items of a request that may be served.

        Raises:
            BadRequest: it may not.
        """
        if not self._config.trust_request_mm_kwargs:
            check_mm_kwargs(body)
        return at_most(context.endpoint.items(body), self._config.max_items)

    async def _keyed(
        self, body: Body, items: tuple[MMItem, ...], context: RequestContext
    ) -> tuple[Body, Mapping[MMItem, str | None]]:
        """The request, with media in it that the proxy fetches, and the keys of its items."""
        if not items:
            return body, {}
        inlined = await self._media.inlined(body, items, context.tenant.name)
        if inlined is not body:
            items = tuple(context.endpoint.items(inlined))
        return inlined, await self._keys.of(inlined, items, context.tenant, context.cuts)

    async def _prepare(
        self,
        attempts: Attempts,
        body: Body,
        uuids: Mapping[MMItem, str | None],
        context: RequestContext,
    ) -> None:
        """Encode what is not encoded yet, or all of it anew, and make of it what is sent next."""
        course, first = attempts.course, attempts.encoded is None
        if attempts.encoded is None or attempts.anew or self._transfer.pushed:
            attempts.encoded = (
                await self._encoder.encode(
                    body, uuids, context, attempts.consumer, anew=attempts.anew
                )
                if course.encode
                else raw_items(uuids)
            )
        if first and uuids and course.encode:
            # Before the answer: who has it may use the name.
            named = [one for one in attempts.encoded if one.item.uuid is not None]
            await self._keys.remember(body, named, context.tenant)
        if attempts.without_prefill:
            context.record.degraded.add("prefill-local")
        # Decode without prefill looks for no encoder output, but where it is both.
        alone = not course.prefill and self._table.has(Role.DECODE)
        raw = self._config.decode_media == "raw" or attempts.anew or attempts.without_prefill
        raw = raw or alone
        params = self._transfer.consumer_params(one.encoded for one in attempts.encoded)
        sent = consumer_body(body, attempts.encoded, params, raw=raw)
        # Who is told of a push waits for it, media or not.
        depends = sent.depends or bool(params and self._transfer.pushed)
        attempts.sent = sent._replace(depends=depends)
        context.record.saved_bytes = 0
        if context.record.hits:
            unsent = metadata_uuids(attempts.encoded, body, raw=raw)
            hits = [one.item for one in attempts.encoded if one.result == "hit"]
            context.record.saved_bytes = sum(
                inline_bytes(item, context.cuts) for item in hits if item in unsent
            )

    def _do_without_prefill(self, attempts: Attempts) -> None:
        """Let decode do prefill's work where nobody else is there to do it."""
        if (
            attempts.course.prefill
            and not self._table.has(Role.PREFILL)
            and self._config.on_prefill_failure == "local"
        ):
            attempts.without_prefill = True

    def _facts(self, body: Body, items: tuple[MMItem, ...], context: RequestContext) -> Facts:
        return Facts(
            context.endpoint.path,
            context.endpoint.prefills(body),
            len(items),
            self._table.roles,
            partial(prompt_tokens, body),
            context.client_headers,
        )

    def _course(self, facts: Facts, context: RequestContext) -> Course:
        """What runs for a request.

        Raises:
            NoInstance: no policy has anything to say of it.
        """
        if (decided := self._coordinate(facts)) is not None:
            context.record.policy, course = decided
            return course
        if facts.roles.isdisjoint(ANSWERING):
            raise NoInstance("there is no decode instance", slug="no_decode")
        raise NoInstance("no policy says where this request is to run", slug="no_policy")

    def _next(self, attempts: Attempts, error: ProxyError) -> float | None:
        """Prepare for the next attempt: how long until then, in seconds; None: there is none."""
        if error.stage not in {"prefill", "decode"}:
            return None
        if error.stage == "prefill" and attempts.reads_back and may_be_blocks(error):
            attempts.prefills.pop()
            return 0.0
        if not isinstance(error, UpstreamUnreachable):
            attempts.failures.append(error.stage)
        if error.stage == "decode" and error.answered == HTTPStatus.INTERNAL_SERVER_ERROR:
            attempts.doubtful = attempts.decodes[-1]
        # An engine that cannot load what it was named fails the request and says no more than that.
        lost = error.answered == HTTPStatus.INTERNAL_SERVER_ERROR and not attempts.anew
        if lost and attempts.sent.depends:
            attempts.anew = True
            return 0.0
        if error.stage == "prefill":
            return self._after_prefill(attempts, error)
        return self._after_decode(attempts, error)

    def _after_prefill(self, attempts: Attempts, error: ProxyError) -> float | None:
        if attempts.failures.count("prefill") < MAX_PREFILLS:
            others = self._handovers.other_prefills(attempts)
            delay_s = retry_delay_s(error, others=others)
            if delay_s is not None:
                return delay_s
        if self._config.on_prefill_failure == "local" and is_instances_fault(error):
            attempts.without_prefill = True
            return 0.0
        return None

    def _after_decode(self, attempts: Attempts, error: ProxyError) -> float | None:
        if attempts.failures.count("decode") >= MAX_DECODES or isinstance(error, UpstreamTimeout):
            return None
        # Prefill's blocks could not be fetched, with vLLM's `kv_load_failure_policy` "fail".
        if error.answered == HTTPStatus.INTERNAL_SERVER_ERROR and attempts.prefilled:
            return 0.0
        delay_s = retry_delay_s(
            error, others=self._decoders.others(attempts.course, attempts.decodes)
        )
        unreached = isinstance(error, UpstreamUnreachable)
        if delay_s is None and unreached and attempts.doubtful in attempts.decodes:
            # Better than nobody: what it could not load has been made again.
            attempts.decodes.remove(attempts.doubtful)
            return 0.0
        return delay_s
