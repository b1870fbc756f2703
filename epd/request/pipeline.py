"""One request: encode, prefill where there is one, decode; tried again while nobody has seen it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType

from epd.bodies.items import Body, MMItem, at_most, check_mm_kwargs
from epd.bodies.transfer import Consumed, EncodedItem, Params, consumer_body, metadata_uuids
from epd.cache.encoder_cache import EncoderCache
from epd.cache.keys import Keys
from epd.config import ProxyConfig
from epd.errors import NoInstance, ProxyError, Stage, UpstreamTimeout, UpstreamUnreachable
from epd.http.upstream import Reply
from epd.media.fetch import MediaFetcher
from epd.media.parts import inline_bytes
from epd.request.context import RequestContext
from epd.request.encoding import Encoder
from epd.request.releases import Releases
from epd.request.stages import Decoding, Stages
from epd.routing.instances import ANSWERING, Instance, InstanceTable, Role, Use
from epd.routing.policies import Choice
from epd.routing.retries import Retries, is_instances_fault, retry_delay_s

MAX_PREFILLS = 2
"""Prefill instances that a request is sent to, before decode has to do without."""

MAX_DECODES = 2
"""Decode instances that a request is sent to."""

MAX_ATTEMPTS = MAX_PREFILLS + MAX_DECODES


@dataclass(slots=True)
class Attempts:
    """A request's attempts so far, and what the next one has to do otherwise.

    Attributes:
        prefills: prefill instances that it was sent to.
        decodes: decode instances that it was sent to.
        failures: the stages that have failed; who was not reached has not been asked.
        doubtful: a decode instance that failed as one does that cannot load what it was named:
            who made that may be at fault.
        encoded: its items, once they are encoded.
        sent: what prefill and decode were sent.
        anew: whether entries may have been lost: all is encoded again, and the media go along.
        prefilled: whether decode was sent what a prefill instance had made.
        without_prefill: whether decode does prefill's work.
    """

    prefills: list[Instance] = field(default_factory=list)
    decodes: list[Instance] = field(default_factory=list)
    failures: list[Stage] = field(default_factory=list)
    doubtful: Instance | None = None
    encoded: list[EncodedItem] | None = None
    sent: Consumed = field(default_factory=lambda: Consumed({}))
    anew: bool = False
    prefilled: bool = False
    without_prefill: bool = False

    def alone(self, stage: Stage) -> bool:
        """Whether a stage that fails now does so by itself: the first time, others may have."""
        depends = self.sent.names_entries or (stage == "decode" and self.prefilled)
        return not depends or stage in self.failures


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


class Pipeline:
    """Carries requests through the stages."""

    def __init__(  # noqa: PLR0913, PLR0917 - what a request meets on its way
        self,
        table: InstanceTable,
        stages: Stages,
        media: MediaFetcher,
        cache: EncoderCache | None,
        releases: Releases,
        config: ProxyConfig,
    ) -> None:
        self._table = table
        self._media = media
        self._stages = stages
        self._releases = releases
        self._encoder = Encoder(stages, table, cache, config)
        self._keys = Keys(cache, config)
        self._config = config
        self._retries = Retries()
        self._prefills = Choice(table, "least_load", Role.PREFILL)
        self._decodes = Choice(table, "least_load", *ANSWERING)

    async def run(self, body: Body, context: RequestContext) -> "Answer":
        """The decode instance's answer, its head read, its status 2xx: a context, to be entered.

        Leaving the context, by cancellation too, closes whatever is open upstream.

        Raises:
            BadRequest: the request cannot be served as it is.
            ProxyError: a stage failed.
        """
        if not self._table.of(*ANSWERING):
            raise NoInstance("there is no decode instance", slug="no_decode")
        body, uuids = await self._keyed(body, context)
        attempts = Attempts()

        async def attempt() -> Answer:
            await self._prepare(attempts, body, uuids, context)
            return await self._answered(attempts, context)

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
        body, uuids = await self._keyed(body, context)
        encoded = await self._encoder.encode(body, uuids, context)
        await self._keys.remember(body, encoded, context.tenant)
        return encoded

    async def forget(self, uuid: str, model: str | None, context: RequestContext) -> None:
        """Forget what a client calls so: see `Keys.forget`."""
        await self._keys.forget(uuid, model, context.tenant)

    async def _keyed(
        self, body: Body, context: RequestContext
    ) -> tuple[Body, Mapping[MMItem, str | None]]:
        """The request, with media in it that the proxy fetches, and the keys of its items."""
        if not self._config.trust_request_mm_kwargs:
            check_mm_kwargs(body)
        endpoint = context.endpoint
        items = at_most(endpoint.items(body), self._config.max_items)
        if not items:
            return body, {}
        inlined = await self._media.inlined(body, items, context.tenant.name)
        if inlined is not body:
            items = tuple(endpoint.items(inlined))
        return inlined, await self._keys.of(inlined, items, context.tenant, context.cuts)

    async def _prepare(
        self,
        attempts: Attempts,
        body: Body,
        uuids: Mapping[MMItem, str | None],
        context: RequestContext,
    ) -> None:
        """Encode what is not encoded yet, or all of it anew, and make of it what is sent next."""
        if self._lacks_prefill() and self._config.on_prefill_failure == "local":
            attempts.without_prefill = True
        if not uuids:
            attempts.encoded = []
        elif attempts.encoded is None:
            attempts.encoded = await self._encoder.encode(body, uuids, context)
            # Before the answer: who has it may use the name.
            named = [one for one in attempts.encoded if one.item.uuid is not None]
            await self._keys.remember(body, named, context.tenant)
        elif attempts.anew:
            attempts.encoded = await self._encoder.encode(body, uuids, context, anew=True)
        if attempts.without_prefill:
            context.record.degraded.add("prefill-local")
        raw = self._config.decode_media == "raw" or attempts.anew or attempts.without_prefill
        attempts.sent = consumer_body(body, attempts.encoded, raw=raw)
        context.record.saved_bytes = 0
        if context.record.hits:
            unsent = metadata_uuids(attempts.encoded, body, raw=raw)
            hits = [one.item for one in attempts.encoded if one.result == "hit"]
            context.record.saved_bytes = sum(
                inline_bytes(item, context.cuts) for item in hits if item in unsent
            )

    async def _answered(self, attempts: Attempts, context: RequestContext) -> "Answer":
        params = await self._prefilled(attempts, context)
        attempts.prefilled = params is not None
        sent = attempts.sent.body
        if params is not None:
            sent = {**sent, "kv_transfer_params": params}
        instance = self._decodes.best(tried=attempts.decodes)
        attempts.decodes.append(instance)
        using = self._table.using(instance, alone=attempts.alone("decode"))
        try:
            answer = Answer(using, self._stages.decode(instance, sent, context, using.rank))
            await answer.open()
        except BaseException as error:
            if params is not None and not _was_begun(error):
                self._releases.begin(self._releaser(attempts, error), sent, context)
            raise
        return answer

    async def _prefilled(self, attempts: Attempts, context: RequestContext) -> Params | None:
        """The `kv_transfer_params` of a prefill; None where decode does prefill's work."""
        sent, split = attempts.sent.body, self._table.has(Role.DECODE)
        if attempts.without_prefill or not split or not context.endpoint.prefills(sent):
            return None
        instance = self._prefills.best(tried=attempts.prefills)
        attempts.prefills.append(instance)
        with self._table.using(instance, alone=attempts.alone("prefill")) as use:
            return await self._stages.prefill(instance, sent, context, use.rank)

    def _lacks_prefill(self) -> bool:
        """Whether decode waits for prefill instances that have not come yet, or have gone."""
        return self._table.has(Role.DECODE) and not self._table.has(Role.PREFILL)

    def _releaser(self, attempts: Attempts, error: BaseException) -> Instance:
        """Who is told that a prefill is not wanted: who had it, or another if that failed."""
        failed = isinstance(error, ProxyError) and self._decodes.others(attempts.decodes)
        return self._decodes.best(tried=attempts.decodes) if failed else attempts.decodes[-1]

    def _next(self, attempts: Attempts, error: ProxyError) -> float | None:
        """Prepare for the next attempt: how long until then, in seconds; None: there is none."""
        if error.stage not in {"prefill", "decode"}:
            return None
        if not isinstance(error, UpstreamUnreachable):
            attempts.failures.append(error.stage)
        if error.stage == "decode" and error.answered == HTTPStatus.INTERNAL_SERVER_ERROR:
            attempts.doubtful = attempts.decodes[-1]
        # An engine that cannot load what it was named fails the request and says no more than that.
        lost = error.answered == HTTPStatus.INTERNAL_SERVER_ERROR and not attempts.anew
        if lost and attempts.sent.names_entries:
            attempts.anew = True
            return 0.0
        if error.stage == "prefill":
            return self._after_prefill(attempts, error)
        return self._after_decode(attempts, error)

    def _after_prefill(self, attempts: Attempts, error: ProxyError) -> float | None:
        if attempts.failures.count("prefill") < MAX_PREFILLS:
            others = self._prefills.others(attempts.prefills)
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
        delay_s = retry_delay_s(error, others=self._decodes.others(attempts.decodes))
        unreached = isinstance(error, UpstreamUnreachable)
        if delay_s is None and unreached and attempts.doubtful in attempts.decodes:
            # Better than nobody: what it could not load has been made again.
            attempts.decodes.remove(attempts.doubtful)
            return 0.0
        return delay_s


def _was_begun(error: BaseException) -> bool:
    """Whether decode's engine has had the request, and has told prefill itself.

    What is refused is refused before, and a 4xx too: prefill is sent less than decode is.
    """
    return isinstance(error, ProxyError) and error.answered == HTTPStatus.INTERNAL_SERVER_ERROR
