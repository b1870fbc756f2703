"""Pipeline of a request: encode, optional prefill, decode; retried until its answer has begun."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from epd.api.items import Body, MMItem
from epd.encoder_cache.keys import Keys
from epd.errors import ProxyError
from epd.request.attempts import (
    NO_TARGETS,
    Attempt,
    EncodeJob,
    Encodings,
    Sending,
    Targets,
    item_key,
)
from epd.request.context import RequestContext
from epd.request.encode import Encoder, raw_items
from epd.request.prefill_decode import DecodeAnswer, PrefillDecodeStages
from epd.request.prefix import marked_prompt, request_prefix
from epd.request.recovery import MAX_ATTEMPTS, Failure, next_attempt
from epd.request.request_media import KeyedRequest, RequestMedia, request_work
from epd.request.targets import Courses, Decoders
from epd.routing.instances import Role
from epd.routing.namespaces import Namespaces
from epd.routing.retries import Retries
from epd.routing.table import InstanceTable, Reservation
from epd.transfer.ec import ECTransfer
from epd.transfer.encoded import EncodedItem


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
        sending = Sending(Attempt(course, facts), context)
        with self._retries.tries(MAX_ATTEMPTS) as tries:
            while True:
                try:
                    return await self._send(request, sending)
                except ProxyError as error:
                    attempt = (
                        None if context.watched.is_spent else self._next_attempt(sending, error)
                    )
                    if attempt is None:
                        raise
                    await tries.next_try(error)
                    context.record.retries += 1
                    sending = Sending(attempt, context)

    async def _send(self, request: KeyedRequest, sending: Sending) -> DecodeAnswer:
        """Send a request through its stages once: encode, prefill, decode."""
        self._decode_alone(sending)
        if request.uuids:
            sending.targets = await self._targets(request, sending)
            with sending.targets.consumer or nullcontext():
                job = self._encode_job(request, sending)
                if job is not None:
                    await self._record_outputs(job, sending, await self._encoder.encode(job))
        sending.encoded = True
        sending.prompt = self._media.prompt(request, sending)
        sending.prefix = request_prefix(request.body, request.uuids, sending)
        if sending.context.config.kv_events and sending.prefix.links:
            sending.prompt = marked_prompt(sending.prompt, sending.prefix)
        sending.work = request_work(request.uuids, sending)
        pair = await self._prefill_decode.choose_pair(sending)
        if pair is None:
            return await self._prefill_decode.decode(sending, sending.prompt.body)
        if self._prefill_decode.at_once(pair):
            return await self._prefill_decode.prefill_and_decode(sending, pair)
        prefilled = await self._prefill_decode.prefill(sending, pair)
        return await self._prefill_decode.decode_prefilled(sending, pair, prefilled)

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
        sending.prefix = request_prefix(request.body, request.uuids, sending)
        return await self._prefill_decode.choose_targets(sending, request.body)

    def _namespace(self, consumer: Reservation | None) -> str | None:
        """Return the namespace in which the consumer looks up outputs; None if unknown."""
        if consumer is not None:
            return self._namespaces.namespace_of(consumer.instance)
        known = self._namespaces.of_consumers()
        return next(iter(known)) if len(known) == 1 else None

    def _encode_job(self, request: KeyedRequest, sending: Sending) -> EncodeJob | None:
        """Return the items to encode; None if nothing is encoded, and the outputs are set here.

        That is the case with the outputs of an earlier attempt, and without an encode stage.
        """
        attempt, consumer = sending.attempt, sending.targets.consumer
        namespace, known = self._namespace(consumer), attempt.encodings
        spent = attempt.reencode or self._transfer.pushed
        if known is not None and known.namespace == namespace and not spent:
            sending.encodings = known
            return None
        if not attempt.course.encode:
            uuids = request.uuids
            sending.encodings = _encodings(raw_items(uuids), namespace, uuids)
            return None
        return EncodeJob(
            *request,
            sending.context,
            consumer,
            namespace,
            attempt.reencode,
            rule=attempt.course.items,
        )

    async def _record_outputs(
        self, job: EncodeJob, sending: Sending, items: Sequence[EncodedItem]
    ) -> None:
        """Set the outputs of an attempt, and remember the client's names of the items."""
        context = sending.context
        if sending.attempt.encodings is None:
            # Remember the names before the answer, because the client may use them after it.
            named = [one for one in items if one.item.uuid is not None]
            await self._keys.remember_names(job.body, named, context.tenant, context.config)
        sending.encodings = _encodings(items, job.namespace, job.uuids)

    def _next_attempt(self, sending: Sending, error: ProxyError) -> Attempt | None:
        """Return the attempt after a failed one; None if the client gets the error."""
        return next_attempt(
            Failure(
                sending,
                error,
                other_prefills=self._prefill_decode.other_prefills(sending),
                other_decodes=self._decoders.has_untried(sending.attempt.course, sending.decodes),
                may_prefill_locally=sending.context.config.on_prefill_failure == "local",
            )
        )


def _encodings(
    items: Sequence[EncodedItem], namespace: str | None, uuids: Mapping[MMItem, str | None]
) -> Encodings:
    local = (one.item for one in items if one.result == "local")
    return Encodings(tuple(items), namespace, tuple(item_key(item, uuids[item]) for item in local))
