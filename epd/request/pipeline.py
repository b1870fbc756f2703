"""Pipeline of a request: encode, optional prefill, decode; retried until its answer has begun."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from epd.api.prompts import BYTES_PER_TOKEN, prompt_tokens
from epd.encoder_cache.claims import MakerClaims
from epd.encoder_cache.keys import Keys
from epd.errors import NoInstance, Overloaded, ProxyError
from epd.media.fetch import MediaFetcher
from epd.policies.plan import Course, Facts
from epd.request.decoders import Decoders
from epd.request.encode import Encoder
from epd.request.encode_job import EncodeJob
from epd.request.prefill_decode import DecodeAnswer, PrefillDecodeStages, needs_prefill
from epd.request.prefix import marked_prompt, request_prefix
from epd.request.quarantine import Quarantine
from epd.request.recovery import (
    MAX_ATTEMPTS,
    NO_ENCODINGS,
    NO_PROMPT,
    Attempt,
    Encodings,
    FailedAttempt,
    next_attempt,
)
from epd.request.releases import Releases
from epd.request.request import Request
from epd.request.request_media import keyed_request, media_prompt
from epd.routing.fatal import FatalRequests
from epd.routing.instances import ANSWERING, CONSUMERS, Role
from epd.routing.namespaces import Namespaces
from epd.routing.prefix import NO_PREFIX
from epd.routing.retries import Retries
from epd.routing.table import InstanceTable, Reservation, Work
from epd.transfer.ec import ECTransfer
from epd.transfer.encoded import EncodedItem, Prompt

Coordinate = Callable[[Facts], tuple[str, Course] | None]
"""Returns the deciding policy and the course of a request; None if no policy decides."""


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """Pipeline that runs requests through the stages.

    `_namespaces` is None without a store and without pushed outputs. `_by_content` tells whether
    instances are chosen by the content of prompts.
    """

    _table: InstanceTable
    _coordinate: Coordinate
    _fetcher: MediaFetcher | None
    _keys: Keys
    _transfer: ECTransfer
    _encoder: Encoder
    _prefill_decode: PrefillDecodeStages
    _namespaces: Namespaces | None
    _decoders: Decoders
    _releases: Releases
    _fatal: FatalRequests
    _quarantine: Quarantine
    _by_content: bool
    _retries: Retries = field(default_factory=Retries)

    async def run(self, request: Request) -> DecodeAnswer:
        """Return decode's answer with a 2xx status: a context manager that the caller enters.

        Its exit ends all requests to instances, also after a cancellation. A connection with an
        unfinished answer is closed.

        Raises:
            BadRequest: the request is invalid.
            ProxyError: a stage failed.
        """
        attempt = self._first_attempt(request)
        if request.items:
            request = await keyed_request(request, self._keys, self._fetcher)
        self._fatal.check(request.watched, [item.identity for item in request.items])
        async with self._quarantine.context_for(request.watched):
            claims = self._encoder.consumer_claims() if attempt.course.local else None
            with claims or nullcontext(), self._retries.tries(MAX_ATTEMPTS) as tries:
                while True:
                    outcome = await self._run_attempt(request, attempt, claims)
                    if isinstance(outcome, DecodeAnswer):
                        if claims is not None:
                            outcome.claims = claims.hand_over()
                        return outcome
                    request.media.memory.withdraw_offer()
                    following = None if request.is_spent else next_attempt(outcome)
                    if following is None:
                        raise outcome.error
                    if request.media.given_up:
                        raise Overloaded(
                            "the request failed, and its media made room for other requests: send "
                            "it again"
                        ) from outcome.error
                    await tries.next_try(outcome.error)
                    attempt = following
                    del outcome  # and the bodies that the failed attempt made
                    request.record.add_retry()

    async def _run_attempt(
        self, request: Request, attempt: Attempt, claims: MakerClaims | None
    ) -> DecodeAnswer | FailedAttempt:
        """Send a request through its stages once: encode, prefill, decode.

        Return decode's answer; or the error of a step, with the results of the steps before.
        """
        stages, prompt = self._prefill_decode, NO_PROMPT
        first = encodings = prefill = handover = decode = None
        may_prefill_locally = request.config.on_prefill_failure == "local"
        if attempt.course.prefill and may_prefill_locally and not self._table.has(Role.PREFILL):
            attempt = attempt._replace(without_prefill=True)
        try:
            if self._namespaces is not None and request.items:
                first = await self._choose_early(request, attempt, self._namespaces)
            encodings = self._known_encodings(request, attempt, first)
            if encodings is None:
                job = self._encode_job(request, attempt, first)
                with job.consumer_reservation or nullcontext():
                    encoded_items = await self._encoder.encode(job, claims)
                    await self._remember_names(request, attempt, encoded_items)
                encodings = Encodings(encoded_items, job.namespace)
            prompt = self._prompt(request, attempt, encodings)
            first = first or await stages.choose_first(request, attempt, prompt.prefix)
            if first.instance.role is not Role.PREFILL:
                decode = first.instance
                return await stages.decode(request, attempt, prompt, decode, rank=first.rank)
            prefill = first.instance
            handover = await stages.make_handover(request, attempt, prompt, first)
            try:
                at_once = stages.at_once(handover)
                if not at_once:
                    await stages.prefill(request, attempt, prompt, handover)
                decode = handover.decode = handover.decode or await self._decoders.pick_instance(
                    request, attempt, prompt.prefix, prefill
                )
                if at_once:
                    return await stages.prefill_and_decode(
                        request, attempt, prompt, decode, handover
                    )
                return await stages.decode(request, attempt, prompt, decode, handover)
            except BaseException as error:
                self._releases.release_unread(request, attempt, prompt, handover, error)
                raise
        except ProxyError as error:
            failed = FailedAttempt(attempt, error, encodings, prompt, prefill, handover, decode)
            return failed._replace(
                other_prefills=stages.has_untried_prefill(attempt, failed.tried_prefills),
                other_decodes=self._decoders.has_untried(attempt.course, failed.failed_decodes),
                may_prefill_locally=may_prefill_locally,
            )

    async def encode(self, request: Request) -> list[EncodedItem]:
        """Encode the items of a request that asks for nothing else, and remember their keys.

        Raises:
            BadRequest: an item is invalid.
            ProxyError: an item failed.
        """
        if request.items:
            request = await keyed_request(request, self._keys, self._fetcher)
        self._fatal.check(request.watched, [item.identity for item in request.items])
        job = EncodeJob(request, namespace=self._namespace(None))
        async with self._quarantine.context_for(request.watched):
            encoded_items = await self._encoder.encode(job)
        await self._keys.remember_names(request.body, encoded_items, request.tenant, request.config)
        return encoded_items

    def _first_attempt(self, request: Request) -> Attempt:
        """Return the first attempt of a request, as the policies decide it.

        Its decode instance comes from the client's header only if the client sent it. An invalid
        header is rejected before any work for the request starts.

        Raises:
            NoInstance: no policy applies to the request.
            BadRequest: the header's value is invalid.
            RequestRefused: 403, the instance in the header is not allowed.
        """
        facts = Facts(
            request.endpoint.path,
            request.endpoint.can_prefill(request.body),
            len(request.items),
            self._table.roles,
            partial(prompt_tokens, request.body),
            request.client_headers,
        )
        if (decided := self._coordinate(facts)) is None:
            if facts.roles.isdisjoint(ANSWERING):
                raise NoInstance("there is no decode instance: register one", slug="no_decode")
            raise NoInstance("no policy decides where this request runs", slug="no_policy")
        policy, course = decided
        request.record.add_policy(policy)
        if course.decode_from == "header" and self._decoders.named_by_client(request) is None:
            course = course._replace(decode_from="table")
        return Attempt(course, facts)

    async def _choose_early(
        self, request: Request, attempt: Attempt, namespaces: Namespaces
    ) -> Reservation | None:
        """Choose the instance that gets the prompt, if it must be known before the encode.

        It must in two cases: the transfer pushes outputs to it, or consumers have different
        namespaces, so that an output is usable in only one of them. A decode instance consumes no
        outputs, but a picker is asked only once for it.

        Raises:
            ProxyError: no instance is available, or the choice failed.
        """
        differ = attempt.course.encode and len(namespaces.of_consumers()) > 1
        if not (self._transfer.pushed or differ):
            return None
        if not needs_prefill(request, attempt) and not self._table.has(Role.PREFILL_DECODE):
            return None
        prefix = request_prefix(request) if self._by_content else NO_PREFIX
        return await self._prefill_decode.choose_first(request, attempt, prefix)

    def _known_encodings(
        self, request: Request, attempt: Attempt, first: Reservation | None
    ) -> Encodings | None:
        """Return usable encoder outputs of an earlier attempt; None if there are none."""
        if not request.items:
            return NO_ENCODINGS
        known = attempt.encodings
        usable = known is not None and known.namespace == self._namespace(first)
        return known if usable and not self._transfer.pushed else None

    def _encode_job(
        self, request: Request, attempt: Attempt, first: Reservation | None
    ) -> EncodeJob:
        consumer = first if first is not None and first.instance.role in CONSUMERS else None
        namespace = self._namespace(first)
        return EncodeJob(request, attempt.course, consumer, namespace, attempt.reencode)

    async def _remember_names(
        self, request: Request, attempt: Attempt, encoded_items: Sequence[EncodedItem]
    ) -> None:
        """Remember the clients' names of the items, once for each request."""
        if attempt.encodings is None:
            named = [known for known in encoded_items if known.item.uuid is not None]
            await self._keys.remember_names(request.body, named, request.tenant, request.config)

    def _namespace(self, first: Reservation | None) -> str | None:
        """Return the namespace in which the consumer looks up outputs; None if unknown."""
        if self._namespaces is None:
            return None
        if first is not None and first.instance.role in CONSUMERS:
            return self._namespaces.namespace_of(first.instance)
        known = self._namespaces.of_consumers()
        return next(iter(known)) if len(known) == 1 else None

    def _prompt(self, request: Request, attempt: Attempt, encodings: Encodings) -> Prompt:
        """Return the request for prefill and decode, with its content if it is needed."""
        if attempt.without_prefill:
            request.record.add_degraded("prefill-local")
        if request.items:
            prompt = media_prompt(
                request,
                attempt,
                encodings.encoded_items,
                self._transfer,
                has_decode=self._table.has(Role.DECODE),
            )
        else:
            prompt = Prompt(request.body, work=Work(request.text_bytes // BYTES_PER_TOKEN))
        if not self._by_content:
            return prompt
        prefix = request_prefix(request, encodings.encoded_items)
        if prefix.links and request.config.kv_events:
            prompt = marked_prompt(prompt, prefix)
        return prompt._replace(prefix=prefix)
