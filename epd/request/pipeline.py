"""One request: encode, optional prefill, decode; retried until its answer has begun."""

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
    """A request, and the keys of its media items.

    Attributes:
        body: the client's request, with the media that the proxy fetched.
        uuids: keys of the items; None for a key that an engine makes.
    """

    body: Body
    uuids: Mapping[MMItem, str | None]


class Pipeline:
    """Runs requests through the stages."""

    def __init__(  # noqa: PLR0913, PLR0917 - its collaborators
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
        """Return decode's answer with a 2xx status: a context manager that the caller enters.

        Its exit closes all upstream connections of the request, also after a cancellation.

        Raises:
            BadRequest: the request is invalid.
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
        """Encode the items of a request that asks for nothing else, and remember their keys.

        Raises:
            BadRequest: an item is invalid.
            ProxyError: an item failed.
        """
        body, uuids = await self._keyed(body, self._items(body, context), context)
        namespace = self._namespace(None)
        encoded = await self._encoder.encode(EncodeJob(body, uuids, context, namespace=namespace))
        await self._keys.remember(body, encoded, context.tenant, context.config)
        return encoded

    async def forget(self, uuid: str, model: str | None, context: RequestContext) -> None:
        """Forget the key of a client's uuid: see `Keys.forget`."""
        await self._keys.forget(uuid, model, context.tenant, context.config)

    def _items(self, body: Body, context: RequestContext) -> tuple[MMItem, ...]:
        """Return the media items of a valid request.

        Raises:
            BadRequest: the request is invalid.
        """
        if not context.config.trust_request_mm_kwargs:
            check_mm_kwargs(body)
        return at_most(context.endpoint.items(body), context.config.max_items)

    async def _keyed(
        self, body: Body, items: tuple[MMItem, ...], context: RequestContext
    ) -> KeyedRequest:
        """Fetch the media that the proxy has to fetch, and determine the keys of the items.

        Raises:
            SuspectedFatal: instances have died of an item.
            ProxyError: a fetch failed, or an item is invalid.
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
        """Let decode do prefill's work if there is no prefill instance."""
        local = sending.context.config.on_prefill_failure == "local"
        if sending.attempt.course.prefill and local and not self._table.has(Role.PREFILL):
            sending.attempt = sending.attempt._replace(without_prefill=True)

    async def _targets(self, request: KeyedRequest, sending: Sending) -> Targets:
        """Choose the instance that will consume the encoder outputs, if the encode depends on it.

        It does in two cases: the transfer pushes outputs to the consumer, or consumers have
        different namespaces, so that an output is usable in only one of them.
        """
        encodes = sending.attempt.course.encode
        differ = encodes and len(self._namespaces.of_consumers()) > 1
        if not (self._transfer.pushed or differ):
            return NO_TARGETS
        return await self._handovers.targets(sending, request.body)

    def _namespace(self, consumer: Place | None) -> str | None:
        """Return the namespace in which the consumer looks up outputs; None if unknown."""
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
            # Remember the names before the answer, because the client may use them after it.
            named = [one for one in items if one.item.uuid is not None]
            await self._keys.remember(body, named, context.tenant, context.config)
        local = (one.item for one in items if one.result == "local")
        keys = tuple(item_key(item, uuids[item]) for item in local)
        return Encodings(tuple(items), namespace, keys)

    def _prompt(self, request: KeyedRequest, sending: Sending) -> Consumed:
        """Return the body for prefill and decode."""
        attempt, record = sending.attempt, sending.context.record
        items = sending.encodings.items
        record.saved_bytes = 0
        if attempt.without_prefill:
            record.degraded.add("prefill-local")
        if not items:
            return Consumed(request.body)
        # A decode-only instance looks up no encoder outputs.
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
        """Return the course that the policies decide for a request.

        Raises:
            NoInstance: no policy applies to the request.
        """
        if (decided := self._coordinate(context.config, facts)) is not None:
            context.record.policy, course = decided
            return course
        if facts.roles.isdisjoint(ANSWERING):
            raise NoInstance("there is no decode instance: register one", slug="no_decode")
        raise NoInstance("no policy decides where this request runs", slug="no_policy")

    def _next_attempt(self, sending: Sending, error: ProxyError) -> Attempt | None:
        """Return the attempt after a failed one; None if the client gets the error."""
        return next_attempt(
            Failure(
                sending,
                error,
                other_prefills=self._handovers.other_prefills(sending),
                other_decodes=self._decoders.others(sending.attempt.course, sending.decodes),
                may_prefill_locally=sending.context.config.on_prefill_failure == "local",
            )
        )
