"""Pipeline of a request: encode, optional prefill, decode; retried until its answer has begun."""

from collections.abc import Sequence
from contextlib import nullcontext

from epd.api.items import Body
from epd.encoder_cache.keys import Keys
from epd.errors import ProxyError
from epd.request.attempts import (
    NO_ENCODINGS,
    NO_TARGETS,
    Attempt,
    EncodeJob,
    Encodings,
    FailedAttempt,
    KeyedRequest,
    PreparedRequest,
    Sending,
    Targets,
)
from epd.request.context import RequestContext
from epd.request.encode import Encoder, raw_items
from epd.request.kv_peers import KVHandover, Releases
from epd.request.prefill_decode import DecodeAnswer, PrefillDecodeStages
from epd.request.prefix import marked_prompt, request_prefix
from epd.request.recovery import MAX_ATTEMPTS, Failure, next_attempt
from epd.request.request_media import RequestMedia, request_work
from epd.request.targets import Courses, Decoders
from epd.routing.instances import Role
from epd.routing.namespaces import Namespaces
from epd.routing.retries import Retries
from epd.routing.table import InstanceTable, Reservation
from epd.transfer.ec import ECTransfer
from epd.transfer.encoded import Consumed, EncodedItem


class Pipeline:
    """Pipeline that runs requests through the stages."""

    def __init__(  # noqa: PLR0913, PLR0917 - its collaborators
        self,
        table: InstanceTable,
        namespaces: Namespaces,
        courses: Courses,
        media: RequestMedia,
        keys: Keys,
        encoder: Encoder,
        transfer: ECTransfer,
        prefill_decode: PrefillDecodeStages,
        decoders: Decoders,
        releases: Releases,
    ) -> None:
        self._table = table
        self._namespaces = namespaces
        self._courses = courses
        self._media = media
        self._keys = keys
        self._encoder = encoder
        self._transfer = transfer
        self._prefill_decode = prefill_decode
        self._decoders = decoders
        self._releases = releases
        self._retries = Retries()

    async def run(self, body: Body, context: RequestContext) -> DecodeAnswer:
        """Return decode's answer with a 2xx status: a context manager that the caller enters.

        Its exit closes all upstream connections of the request, also after a cancellation.

        Raises:
            BadRequest: the request is invalid.
            ProxyError: a stage failed.
        """
        items = self._media.items(body, context)
        facts, course = self._courses.choose_policy(body, len(items), context)
        course = self._decoders.resolve_header(course, context)
        request = await self._media.keyed(body, items, context)
        attempt = Attempt(course, facts)
        with self._retries.tries(MAX_ATTEMPTS) as tries:
            while True:
                result = await self._send(self._sending(request, attempt, context))
                if not isinstance(result, FailedAttempt):
                    return result
                following = self._next_attempt(result, context)
                if following is None:
                    raise result.error
                await tries.next_try(result.error)
                attempt = following
                context.record.retries += 1

    async def _send(self, sending: Sending) -> DecodeAnswer | FailedAttempt:
        """Send a request through its stages once: encode, prefill, decode.

        Returns:
            Decode's answer; or the error of a step, with the results of the steps before.
        """
        stages = self._prefill_decode
        encodings = prepared = place = pair = decode = None
        try:
            targets = await self._targets(sending) if sending.request.uuids else NO_TARGETS
            encodings = self._known_encodings(sending, targets.consumer)
            if encodings is None:
                with targets.consumer or nullcontext():
                    job = self._encode_job(sending, targets.consumer)
                    items = await self._encoder.encode(job)
                    await self._remember_names(sending, items)
                encodings = Encodings.of_items(items, job.namespace, job.uuids)
            prepared = self._prepared(sending, encodings)
            place = await stages.choose_prefill(prepared, targets.consumer)
            if place is None:
                decode = await stages.choose_decode(prepared, targets.instance)
                return await stages.decode(prepared, decode, targets.consumer)
            pair = await stages.make_pair(prepared, place)
            other_decode = self._decoders.untried_instance
            with KVHandover(self._releases, other_decode, prepared, place, pair) as handover:
                if stages.at_once(pair):
                    decode = await stages.choose_decode(prepared, pair.decode, pair)
                    return await stages.prefill_and_decode(handover, decode)
                await stages.prefill(handover)
                decode = await stages.choose_decode(prepared, pair.decode, pair)
                return await stages.decode(prepared, decode, handover=handover)
        except ProxyError as error:
            return FailedAttempt(
                sending.attempt,
                error,
                encodings,
                depends=prepared is not None and prepared.consumed.depends,
                prefill=None if place is None else place.instance,
                reads_back=pair is not None and pair.earlier is not None,
                prefilled=pair is not None,
                decode=decode,
            )

    async def encode(self, body: Body, context: RequestContext) -> list[EncodedItem]:
        """Encode the items of a request that asks for nothing else, and remember their keys.

        Raises:
            BadRequest: an item is invalid.
            ProxyError: an item failed.
        """
        items = self._media.items(body, context)
        request = await self._media.keyed(body, items, context)
        namespace = self._namespace(None)
        encoded = await self._encoder.encode(EncodeJob(*request, context, namespace=namespace))
        await self._keys.remember_names(request.body, encoded, context.tenant, context.config)
        return encoded

    async def forget_uuid(self, uuid: str, model: str | None, context: RequestContext) -> None:
        """Forget the key of a client's uuid: see `Keys.forget_uuid`."""
        await self._keys.forget_uuid(uuid, model, context.tenant, context.config)

    def _sending(self, request: KeyedRequest, attempt: Attempt, context: RequestContext) -> Sending:
        """Return the input of the stages. Without a prefill instance, decode does its work."""
        local = context.config.on_prefill_failure == "local"
        if attempt.course.prefill and local and not self._table.has(Role.PREFILL):
            attempt = attempt._replace(without_prefill=True)
        return Sending(request, attempt, context)

    async def _targets(self, sending: Sending) -> Targets:
        """Choose the instance that will consume the encoder outputs, if the encode depends on it.

        It does in two cases: the transfer pushes outputs to the consumer, or consumers have
        different namespaces, so that an output is usable in only one of them.
        """
        encodes = sending.attempt.course.encode
        differ = encodes and len(self._namespaces.of_consumers()) > 1
        if not (self._transfer.pushed or differ):
            return NO_TARGETS
        body, prefix = Consumed(sending.request.body), request_prefix(sending)
        raw = PreparedRequest(sending, NO_ENCODINGS, body, prefix)
        return await self._prefill_decode.choose_targets(raw)

    def _namespace(self, consumer: Reservation | None) -> str | None:
        """Return the namespace in which the consumer looks up outputs; None if unknown."""
        if consumer is not None:
            return self._namespaces.namespace_of(consumer.instance)
        known = self._namespaces.of_consumers()
        return next(iter(known)) if len(known) == 1 else None

    def _known_encodings(self, sending: Sending, consumer: Reservation | None) -> Encodings | None:
        """Return the encoder outputs if nothing has to be encoded; None otherwise.

        They are those of an earlier attempt, or the items themselves without an encode stage.
        """
        (_, uuids, _), attempt, _ = sending
        if not uuids:
            return NO_ENCODINGS
        known, namespace = attempt.encodings, self._namespace(consumer)
        spent = attempt.reencode or self._transfer.pushed
        if known is not None and known.namespace == namespace and not spent:
            return known
        if attempt.course.encode:
            return None
        return Encodings.of_items(raw_items(uuids), namespace, uuids)

    def _encode_job(self, sending: Sending, consumer: Reservation | None) -> EncodeJob:
        request, attempt, context = sending
        namespace, rule = self._namespace(consumer), attempt.course.items
        return EncodeJob(*request, context, consumer, namespace, attempt.reencode, rule=rule)

    async def _remember_names(self, sending: Sending, items: Sequence[EncodedItem]) -> None:
        """Remember the client's names of the items, which its next request may use."""
        (body, *_), attempt, context = sending
        if attempt.encodings is None:
            named = [encoded_item for encoded_item in items if encoded_item.item.uuid is not None]
            await self._keys.remember_names(body, named, context.tenant, context.config)

    def _prepared(self, sending: Sending, encodings: Encodings) -> PreparedRequest:
        """Return the request as prefill and decode get it."""
        consumed = self._media.consumed(sending, encodings)
        prefix = request_prefix(sending, encodings.items)
        if prefix.links and sending.context.config.kv_events:
            consumed = marked_prompt(consumed, prefix)
        work = request_work(sending, encodings)
        return PreparedRequest(sending, encodings, consumed, prefix, work)

    def _next_attempt(self, failed: FailedAttempt, context: RequestContext) -> Attempt | None:
        """Return the attempt after a failed one; None if the client gets the error."""
        if context.watched.is_spent:
            return None
        course, decodes = failed.attempt.course, failed.failed_decodes
        return next_attempt(
            Failure(
                failed,
                other_prefills=self._prefill_decode.other_prefills(failed),
                other_decodes=self._decoders.has_untried(course, decodes),
                may_prefill_locally=context.config.on_prefill_failure == "local",
            )
        )
