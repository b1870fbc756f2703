"""Pipeline of a request: encode, optional prefill, decode; retried until its answer has begun."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from epd.api.items import Body, MMItem
from epd.encoder_cache.keys import Keys
from epd.errors import Overloaded, ProxyError
from epd.request.context import RequestContext
from epd.request.encode import Encoder
from epd.request.kv_peers import KVHandover, Releases
from epd.request.prefill_decode import DecodeAnswer, PrefillDecodeStages
from epd.request.prefix import marked_prompt, request_prefix
from epd.request.quarantine import Quarantine
from epd.request.recovery import (
    MAX_ATTEMPTS,
    NO_ENCODINGS,
    Attempt,
    AttemptProgress,
    Encodings,
    FailedAttempt,
    RecoveryState,
    next_attempt,
)
from epd.request.request_media import RequestMedia, request_work
from epd.request.stage_inputs import (
    NO_TARGETS,
    EarlyTargets,
    EncodeJob,
    KeyedRequest,
    PreparedRequest,
    StageInput,
)
from epd.request.targets import Courses, Decoders
from epd.routing.instances import Instance, Role
from epd.routing.namespaces import Namespaces
from epd.routing.retries import Retries
from epd.routing.table import InstanceTable
from epd.transfer.ec import ECTransfer
from epd.transfer.encoded import Consumed, EncodedItem


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """Pipeline that runs requests through the stages."""

    _table: InstanceTable
    _namespaces: Namespaces
    _courses: Courses
    _media: RequestMedia
    _keys: Keys
    _encoder: Encoder
    _transfer: ECTransfer
    _prefill_decode: PrefillDecodeStages
    _decoders: Decoders
    _releases: Releases
    _quarantine: Quarantine
    _retries: Retries = field(default_factory=Retries)

    async def run(self, body: Body, context: RequestContext) -> DecodeAnswer:
        """Return decode's answer with a 2xx status: a context manager that the caller enters.

        Its exit ends all requests to instances, also after a cancellation. A connection with an
        unfinished answer is closed.

        Raises:
            BadRequest: the request is invalid.
            ProxyError: a stage failed.
        """
        items = self._media.items(body, context)
        facts, course = self._courses.choose_course(body, len(items), context)
        course = self._decoders.resolve_header(course, context)
        request = await self._media.keyed(body, items, context)
        context.watched.kind = _kind(body, items, context)
        attempt = Attempt(course, facts)
        async with self._quarantine.context_for(context.watched):
            with self._retries.tries(MAX_ATTEMPTS) as tries:
                while True:
                    result = await self._run_attempt(self._stage_input(request, attempt, context))
                    if not isinstance(result, FailedAttempt):
                        return result
                    if (following := self._attempt_after(result, context)) is None:
                        raise result.error
                    if context.gave_up_media:
                        raise Overloaded(
                            "the request failed, and its media made room for other requests: send "
                            "it again"
                        ) from result.error
                    await tries.next_try(result.error)
                    attempt = following
                    del result  # and the bodies that the failed attempt made
                    context.record.retries += 1

    async def _run_attempt(self, stage_input: StageInput) -> DecodeAnswer | FailedAttempt:
        """Send a request through its stages once: encode, prefill, decode.

        Return decode's answer; or the error of a step, with the results of the steps before.
        """
        stages, progress = self._prefill_decode, AttemptProgress()
        try:
            targets = await self._early_targets(stage_input)
            encodings = self._earlier_encodings(stage_input, targets)
            if encodings is None:
                job = self._encode_job(stage_input, targets)
                with targets.consumer_reservation or nullcontext():
                    encoded_items = await self._encoder.encode(job)
                    await self._remember_names(stage_input, encoded_items)
                encodings = Encodings(encoded_items, job.namespace)
            progress.encodings = encodings
            prepared = self._prepared(stage_input, encodings)
            progress.consumed = prepared.consumed
            prefill_place = await stages.choose_prefill(prepared, targets)
            if prefill_place is None:
                decode = targets.consumer or targets.decode or await stages.choose_decode(prepared)
                progress.decode = decode
                return await stages.decode(prepared, decode, rank=targets.consumer_rank)
            progress.prefill = prefill_place.instance
            pair = progress.pair = await stages.make_pair(prepared, prefill_place)
            choose, at_once = self._decoders.choose_release_instance, stages.at_once(pair)
            with KVHandover(self._releases, choose, prepared, pair) as handover:
                if not at_once:
                    await stages.prefill(handover)
                decode = pair.decode or await stages.choose_decode(prepared, pair)
                progress.decode = decode
                if at_once:
                    return await stages.prefill_and_decode(handover, decode)
                return await stages.decode(prepared, decode, handover)
        except ProxyError as error:
            return FailedAttempt(stage_input.attempt, error, progress)

    async def encode(self, body: Body, context: RequestContext) -> list[EncodedItem]:
        """Encode the items of a request that asks for nothing else, and remember their keys.

        Raises:
            BadRequest: an item is invalid.
            ProxyError: an item failed.
        """
        items = self._media.items(body, context)
        request = await self._media.keyed(body, items, context)
        job = EncodeJob(request, context, namespace=self._namespace(None))
        context.watched.kind = _kind(body, items, context)
        async with self._quarantine.context_for(context.watched):
            encoded_items = await self._encoder.encode(job)
        await self._keys.remember_names(request.body, encoded_items, context.tenant, context.config)
        return encoded_items

    async def forget_uuid(self, uuid: str, model: str | None, context: RequestContext) -> None:
        """Forget the key of a client's uuid: see `Keys.forget_uuid`."""
        await self._keys.forget_uuid(uuid, model, context.tenant, context.config)

    def _stage_input(
        self, request: KeyedRequest, attempt: Attempt, context: RequestContext
    ) -> StageInput:
        """Return the input of the stages. Without a prefill instance, decode also prefills."""
        local = context.config.on_prefill_failure == "local"
        if attempt.course.prefill and local and not self._table.has(Role.PREFILL):
            attempt = attempt._replace(without_prefill=True)
        return StageInput(request, attempt, context)

    async def _early_targets(self, stage_input: StageInput) -> EarlyTargets:
        """Choose the instance that will consume the encoder outputs, if it must be known early.

        It must in two cases: the transfer pushes outputs to the consumer, or consumers have
        different namespaces, so that an output is usable in only one of them.
        """
        encodes = stage_input.attempt.course.encode
        differ = encodes and len(self._namespaces.of_consumers()) > 1
        if not stage_input.request.media_items or not (self._transfer.pushed or differ):
            return NO_TARGETS
        body, prefix = Consumed(stage_input.request.body), request_prefix(stage_input)
        unencoded = PreparedRequest(stage_input, NO_ENCODINGS, body, prefix)
        return await self._prefill_decode.choose_early_targets(unencoded)

    def _earlier_encodings(
        self, stage_input: StageInput, targets: EarlyTargets
    ) -> Encodings | None:
        """Return the encoder outputs of an earlier attempt; None if there are no usable ones."""
        if not stage_input.request.media_items:
            return NO_ENCODINGS
        earlier, namespace = stage_input.attempt.encodings, self._namespace(targets.consumer)
        if earlier is None or earlier.namespace != namespace:
            return None
        return None if self._transfer.pushed else earlier

    def _encode_job(self, stage_input: StageInput, targets: EarlyTargets) -> EncodeJob:
        return EncodeJob(
            stage_input.request,
            stage_input.context,
            stage_input.attempt.course,
            targets.consumer_reservation,
            self._namespace(targets.consumer),
            stage_input.attempt.reencode,
        )

    async def _remember_names(
        self, stage_input: StageInput, encoded_items: Sequence[EncodedItem]
    ) -> None:
        if stage_input.attempt.encodings is None:
            body, context = stage_input.request.body, stage_input.context
            named = [encoded for encoded in encoded_items if encoded.item.uuid is not None]
            await self._keys.remember_names(body, named, context.tenant, context.config)

    def _namespace(self, consumer: Instance | None) -> str | None:
        """Return the namespace in which the consumer looks up outputs; None if unknown."""
        if consumer is not None:
            return self._namespaces.namespace_of(consumer)
        known = self._namespaces.of_consumers()
        return next(iter(known)) if len(known) == 1 else None

    def _prepared(self, stage_input: StageInput, encodings: Encodings) -> PreparedRequest:
        consumed = self._media.consumed(stage_input, encodings)
        prefix = request_prefix(stage_input, encodings.encoded_items)
        if prefix.links and stage_input.context.config.kv_events:
            consumed = marked_prompt(consumed, prefix)
        work = request_work(stage_input, encodings)
        return PreparedRequest(stage_input, encodings, consumed, prefix, work)

    def _attempt_after(self, failed: FailedAttempt, context: RequestContext) -> Attempt | None:
        """Return the attempt after a failed one; None if the client gets the error."""
        context.held.withdraw_offer()
        if context.is_spent:
            return None
        course, decodes = failed.attempt.course, failed.failed_decodes
        return next_attempt(
            RecoveryState(
                failed,
                other_prefills=self._prefill_decode.other_prefills(failed),
                other_decodes=self._decoders.has_untried(course, decodes),
                may_prefill_locally=context.config.on_prefill_failure == "local",
            )
        )


def _kind(body: Body, items: Sequence[MMItem], context: RequestContext) -> int:
    """Return a digest of the parts of a request that its variants share."""
    modalities = frozenset([item.modality for item in items])
    return hash((context.endpoint.path, *body, modalities, context.text_bytes.bit_length()))
