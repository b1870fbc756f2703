"""One request: encode, prefill where there is one, decode; retried until its answer has begun."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

from epd.bodies.items import Body, MMItem, at_most, check_mm_kwargs
from epd.bodies.prompt import prompt_tokens
from epd.cache.encoder_cache import EncoderCache
from epd.cache.keys import Keys
from epd.config import ProxyConfig
from epd.errors import NoInstance, ProxyError
from epd.media.fetch import MediaFetcher
from epd.media.parts import inline_bytes
from epd.policies.course import Course, Facts
from epd.request.context import RequestContext
from epd.request.decoders import Decoders
from epd.request.encode_job import EncodeJob, item_key
from epd.request.encoding import Encoder, raw_items
from epd.request.handover import Answer, Handovers
from epd.request.recovery import MAX_ATTEMPTS, Failure, next_attempt
from epd.request.sending import (
    NO_ENCODINGS,
    NO_TARGETS,
    Attempt,
    Encodings,
    Sending,
    Targets,
)
from epd.request.stages import Stages
from epd.routing.fatal import FatalRequests
from epd.routing.instances import ANSWERING, Role
from epd.routing.namespaces import Namespaces
from epd.routing.retries import Retries
from epd.routing.table import InstanceTable
from epd.routing.use import Place
from epd.transfer.ec import ECTransfer
from epd.transfer.encoded import Consumed, EncodedItem, consumer_body, metadata_uuids


class KeyedRequest(NamedTuple):
    """A request whose media items have keys.

    Attributes:
        body: as the client sent it, with the media in it that the proxy fetched.
        uuids: its items and their keys; None: an engine makes the key.
    """

    body: Body
    uuids: Mapping[MMItem, str | None]


class Pipeline:
    """Carries requests through the stages."""

    def __init__(  # noqa: PLR0913, PLR0917 - what a request meets on its way
        self,
        table: InstanceTable,
        namespaces: Namespaces,
        stages: Stages,
        media: MediaFetcher,
        cache: EncoderCache | None,
        transfer: ECTransfer,
        handovers: Handovers,
        decoders: Decoders,
        fatal: FatalRequests,
        coordinate: Callable[[ProxyConfig, Facts], tuple[str, Course] | None],
    ) -> None:
        self._table = table
        self._namespaces = namespaces
        self._media = media
        self._handovers = handovers
        self._decoders = decoders
        self._transfer = transfer
        self._fatal = fatal
        self._encoder = Encoder(stages, namespaces, table, cache, transfer, fatal)
        self._keys = Keys(cache)
        self._retries = Retries()
        self._coordinate = coordinate

    async def run(self, body: Body, context: RequestContext) -> Answer:
        """Return decode's answer, begun, its status 2xx: a context, to be entered.

        Leaving the context, by cancellation too, closes whatever is open upstream.

        Raises:
            BadRequest: the request cannot be served as it is.
            ProxyError: a stage failed.
        """
        items = self._items(body, context)
        facts = self._facts(body, items, context)
        course = self._decoders.settled(self._course(facts, context), context)
        request = await self._keyed(body, items, context)
        sending = Sending(Attempt(course, facts), context)
        with self._retries.tries(MAX_ATTEMPTS) as tries:
            while True:
                try:
                    return await self._send(request, sending)
                except ProxyError as error:
                    attempt = None if context.watched.spent else self._next_attempt(sending, error)
                    if attempt is None:
                        raise
                    await tries.another(error)
                    context.record.retries += 1
                    sending = Sending(attempt, context)

    async def _send(self, request: KeyedRequest, sending: Sending) -> Answer:
        """Send a request through its stages once: encode, prefill, decode."""
        self._decode_alone(sending)
        if request.uuids:
            sending.targets = await self._targets(request, sending)
            with sending.targets.consumer or nullcontext():
                sending.encodings = await self._encode(request, sending)
        else:
            sending.encodings = NO_ENCODINGS
        sending.prompt = self._prompt(request, sending)
        pair = await self._handovers.pair(sending)
        if pair is None:
            return await self._handovers.decode(sending, sending.prompt.body)
        if self._handovers.at_once(pair):
            return await self._handovers.prefill_and_decode(sending, pair)
        prefilled = await self._handovers.prefill(sending, pair)
        return await self._handovers.decode_prefilled(sending, pair, prefilled)

    async def encode(self, body: Body, context: RequestContext) -> list[EncodedItem]:
        """Have the items of a request encoded that asks for nothing else, and remember them.

        Raises:
            BadRequest: an item cannot be encoded as it is.
            ProxyError: the first item that failed.
        """
        body, uuids = await self._keyed(body, self._items(body, context), context)
        namespace = self._namespace(None)
        encoded = await self._encoder.encode(EncodeJob(body, uuids, context, namespace=namespace))
        await self._keys.remember(body, encoded, context.tenant, context.config)
        return encoded

    async def forget(self, uuid: str, model: str | None, context: RequestContext) -> None:
        """Forget what a client calls so: see `Keys.forget`."""
        await self._keys.forget(uuid, model, context.tenant, context.config)

    def _items(self, body: Body, context: RequestContext) -> tuple[MMItem, ...]:
        """The media items of a request that may be served.

        Raises:
            BadRequest: it may not.
        """
        if not context.config.trust_request_mm_kwargs:
            check_mm_kwargs(body)
        return at_most(context.endpoint.items(body), context.config.max_items)

    async def _keyed(
        self, body: Body, items: tuple[MMItem, ...], context: RequestContext
    ) -> KeyedRequest:
        """Put the media into a request that the proxy fetches, and give its items their keys.

        Raises:
            SuspectedFatal: instances have died of it.
            ProxyError: media could not be fetched, or an item cannot be served.
        """
        uuids: Mapping[MMItem, str | None] = {}
        if items:
            inlined, context.cuts = await self._media.inlined(
                body, items, context.config, context.cuts, context.held
            )
            if inlined is not body:
                body, items = inlined, tuple(context.endpoint.items(inlined))
            uuids = await self._keys.of(body, items, context.tenant, context.config, context.cuts)
        self._fatal.check(context.watched, [item_key(*item) for item in uuids.items()])
        return KeyedRequest(body, uuids)

    def _decode_alone(self, sending: Sending) -> None:
        """Have decode do prefill's work where there is no prefill instance to do it."""
        local = sending.context.config.on_prefill_failure == "local"
        if sending.attempt.course.prefill and local and not self._table.has(Role.PREFILL):
            sending.attempt = sending.attempt._replace(without_prefill=True)

    async def _targets(self, request: KeyedRequest, sending: Sending) -> Targets:
        """Choose the instance that items are encoded for, where that matters before.

        It does where outputs are pushed to it, and where consumers have different namespaces: an
        output is of use to one of them alone.
        """
        encodes = sending.attempt.course.encode
        differ = encodes and len(self._namespaces.of_consumers()) > 1
        if not (self._transfer.pushed or differ):
            return NO_TARGETS
        return await self._handovers.targets(sending, request.body)

    def _namespace(self, consumer: Place | None) -> str | None:
        """The namespace that a request's consumer looks into; None: it is not known."""
        if consumer is not None:
            return self._namespaces.of(consumer.instance)
        known = self._namespaces.of_consumers()
        return next(iter(known)) if len(known) == 1 else None

    async def _encode(self, request: KeyedRequest, sending: Sending) -> Encodings:
        """Return the encoder outputs of all items: those of an earlier attempt, or new ones."""
        attempt, context, consumer = sending.attempt, sending.context, sending.targets.consumer
        body, uuids = request
        namespace, known = self._namespace(consumer), attempt.encodings
        spent = attempt.reencode or self._transfer.pushed
        if known is not None and known.namespace == namespace and not spent:
            return known
        if attempt.course.encode:
            job = EncodeJob(body, uuids, context, consumer, namespace, attempt.reencode)
            items = await self._encoder.encode(job)
        else:
            items = raw_items(uuids)
        if known is None and attempt.course.encode:
            # Before the answer: a client that has it may use the name.
            named = [one for one in items if one.item.uuid is not None]
            await self._keys.remember(body, named, context.tenant, context.config)
        local = (one.item for one in items if one.result == "local")
        keys = tuple(item_key(item, uuids[item]) for item in local)
        return Encodings(tuple(items), namespace, keys)

    def _prompt(self, request: KeyedRequest, sending: Sending) -> Consumed:
        """Return what prefill and decode are sent of a request."""
        attempt, record = sending.attempt, sending.context.record
        items = sending.encodings.items
        record.saved_bytes = 0
        if attempt.without_prefill:
            record.degraded.add("prefill-local")
        if not items:
            return Consumed(request.body)
        # Decode without prefill looks for no encoder output, but where it is both.
        alone = not attempt.course.prefill and self._table.has(Role.DECODE)
        lost = attempt.reencode or attempt.without_prefill
        raw = sending.context.config.decode_media == "raw" or lost or alone or attempt.raw
        params = self._transfer.consumer_params(one.encoded for one in items)
        prompt = consumer_body(request.body, items, params, raw=raw)
        record.media = {"metadata": prompt.bare, "raw": len(items) - prompt.bare}
        if record.hits:
            unsent = metadata_uuids(items, request.body, raw=raw)
            hits = [one.item for one in items if one.result == "hit"]
            cuts = sending.context.cuts
            record.saved_bytes = sum(inline_bytes(item, cuts) for item in hits if item in unsent)
        # A consumer that expects a push blocks on it even where the media are in the body too.
        waits = bool(params and self._transfer.pushed)
        return prompt._replace(depends=prompt.depends or waits)

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
        if (decided := self._coordinate(context.config, facts)) is not None:
            context.record.policy, course = decided
            return course
        if facts.roles.isdisjoint(ANSWERING):
            raise NoInstance("there is no decode instance", slug="no_decode")
        raise NoInstance("no policy says where this request is to run", slug="no_policy")

    def _next_attempt(self, sending: Sending, error: ProxyError) -> Attempt | None:
        """Return the attempt that follows a failed one; None: the client gets the error."""
        return next_attempt(
            Failure(
                sending,
                error,
                other_prefills=self._handovers.other_prefills(sending),
                other_decodes=self._decoders.others(sending.attempt.course, sending.decodes),
                may_prefill_locally=sending.context.config.on_prefill_failure == "local",
            )
        )
