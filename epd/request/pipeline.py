"""Pipeline of a request: encode, optional prefill, decode; retried until its answer has begun."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial

from epd.api.prompts import BYTES_PER_TOKEN, prompt_tokens
from epd.encoder_cache.keys import Keys
from epd.errors import NoInstance, ProxyError
from epd.media.fetch import MediaFetcher
from epd.policies.plan import Course, Facts
from epd.request.choices import Choices
from epd.request.encode import Encoder
from epd.request.encode_job import EncodeJob
from epd.request.prefill_decode import DecodeAnswer, PrefillDecodeStages, needs_prefill
from epd.request.prefix import marked_prompt, request_prefix
from epd.request.quarantine import Quarantine
from epd.request.recovery import MAX_ATTEMPTS, Attempt, FailedAttempt, next_attempt
from epd.request.releases import Releases
from epd.request.request import Request
from epd.request.request_media import keyed_request, media_prompt
from epd.routing.fatal import FatalRequests
from epd.routing.instances import ANSWERING, CONSUMERS, Instance, Role
from epd.routing.namespaces import Namespaces
from epd.routing.prefix import NO_PREFIX
from epd.routing.retries import Retries
from epd.routing.table import InstanceTable, Reservation, Work
from epd.transfer.ec import ECTransfer
from epd.transfer.encoded import EncodedItem, Prompt
from epd.transfer.kv import Handover

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
    _choices: Choices
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
        named = self._choices.named_by_client(request)
        attempt = Attempt(self._choose_course(request, named), named)
        request = await self._keyed(request)
        async with self._quarantine.context_for(request.watched):
            with ExitStack() as claims, self._retries.tries(MAX_ATTEMPTS) as tries:
                while True:
                    try:
                        answer = await self._run_attempt(request, attempt, claims)
                    except ProxyError as error:
                        following = self._next_attempt(request, attempt, error)
                        if following is None:
                            raise
                        await tries.next_try(error)
                        attempt = following
                        request.record.add_retry()
                    else:
                        if attempt.course.local:
                            answer.claims = claims.pop_all()
                        return answer

    async def _run_attempt(
        self, request: Request, attempt: Attempt, claims: ExitStack
    ) -> DecodeAnswer:
        """Send a request through its stages once: encode, prefill, decode.

        Raises:
            ProxyError: a step failed. The attempt has the results of the steps before.
        """
        stages = self._prefill_decode
        attempt.without_prefill |= (
            attempt.course.prefill
            and request.config.on_prefill_failure == "local"
            and not self._table.has(Role.PREFILL)
        )
        first = await self._choose_early(request, attempt)
        if (job := self._encode_job(request, attempt, first)) is not None:
            with job.consumer_reservation or nullcontext():
                encoded_items = await self._encoder.encode(job, claims)
                if attempt.encoded_items is None:
                    await self._remember_names(request, encoded_items)
            attempt.encoded_items, attempt.namespace = encoded_items, job.namespace
        prompt = attempt.prompt = self._prompt(request, attempt)
        first = first or await stages.choose_first(request, attempt, prompt.prefix)
        attempt.first = first
        if first.instance.role is not Role.PREFILL:
            return await stages.decode(request, attempt, first.instance, first.rank)
        request_id = request.child_id() if attempt.resent else request.id
        handover = attempt.handover = Handover(request_id, first.instance, first.rank)
        at_once = await stages.prepare(request, attempt, handover)
        try:
            if not at_once:
                await stages.prefill(request, attempt, handover)
            decode = handover.decode = handover.decode or self._choices.choose_decode(
                request, attempt, prompt.prefix, first.instance
            )
            if at_once:
                return await stages.prefill_and_decode(request, attempt, decode, handover)
            return await stages.decode(request, attempt, decode)
        except BaseException as error:
            self._releases.release_unread(request, attempt, handover, error)
            raise

    def _next_attempt(
        self, request: Request, attempt: Attempt, error: ProxyError
    ) -> Attempt | None:
        """Return the attempt that follows a failed one; None if the client gets the error."""
        if request.is_spent:
            return None
        at_prefill = error.stage == "prefill"
        has_untried = (
            self._choices.has_untried_prefill if at_prefill else self._choices.has_untried_decode
        )
        local = request.config.on_prefill_failure == "local"
        return next_attempt(
            FailedAttempt(attempt, error, has_untried(attempt), may_prefill_locally=local)
        )

    async def encode(self, request: Request) -> list[EncodedItem]:
        """Encode the items of a request that asks for nothing else, and remember their keys.

        Raises:
            BadRequest: an item is invalid.
            ProxyError: an item failed.
        """
        request = await self._keyed(request)
        job = EncodeJob(request, namespace=self._namespace(None))
        async with self._quarantine.context_for(request.watched):
            encoded_items = await self._encoder.encode(job)
        await self._keys.remember_names(request.body, encoded_items, request.tenant, request.config)
        return encoded_items

    async def _keyed(self, request: Request) -> Request:
        """Return the request with its items' keys; reject what has ended instances before.

        Raises:
            ProxyError: an item is invalid, or its fetch failed; or the request is rejected.
        """
        if request.items:
            request = await keyed_request(request, self._keys, self._fetcher)
        self._fatal.check(request.watched, [item.identity for item in request.items])
        return request

    def _choose_course(self, request: Request, named: Instance | None) -> Course:
        """Return the course of a request, as the policies decide it.

        Raises:
            NoInstance: no policy applies to the request.
        """
        roles = self._table.roles
        if named is not None and roles.isdisjoint(ANSWERING):
            roles |= {Role.DECODE}
        facts = Facts(
            request.endpoint.path,
            request.endpoint.can_prefill(request.body),
            len(request.items),
            roles,
            partial(prompt_tokens, request.body),
            request.client_headers,
        )
        if (decided := self._coordinate(facts)) is None:
            if facts.roles.isdisjoint(ANSWERING):
                raise NoInstance("there is no decode instance: register one", slug="no_decode")
            raise NoInstance("no policy decides where this request runs", slug="no_policy")
        policy, course = decided
        request.record.add_policy(policy)
        return course

    async def _choose_early(self, request: Request, attempt: Attempt) -> Reservation | None:
        """Choose the instance that gets the prompt, if it must be known before the encode.

        It must in two cases: the transfer pushes outputs to it, or consumers have different
        namespaces, so that an output is usable in only one of them.

        Raises:
            ProxyError: no instance is available, or the choice failed.
        """
        if self._namespaces is None or not request.items:
            return None
        differ = attempt.course.encode and len(self._namespaces.of_consumers()) > 1
        if not (self._transfer.pushed or differ):
            return None
        if not needs_prefill(request, attempt) and not self._table.has(Role.PREFILL_DECODE):
            return None
        prefix = request_prefix(request) if self._by_content else NO_PREFIX
        return await self._prefill_decode.choose_first(request, attempt, prefix)

    def _encode_job(
        self, request: Request, attempt: Attempt, first: Reservation | None
    ) -> EncodeJob | None:
        """Return the items to encode; None without items, or if an earlier attempt encoded them."""
        namespace = self._namespace(first)
        usable = attempt.encoded_items is not None and not self._transfer.pushed
        if not request.items or (usable and namespace == attempt.namespace):
            return None
        consumer = first if first is not None and first.instance.role in CONSUMERS else None
        return EncodeJob(request, attempt.course, consumer, namespace, attempt.reencode)

    async def _remember_names(self, request: Request, encoded_items: Sequence[EncodedItem]) -> None:
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

    def _prompt(self, request: Request, attempt: Attempt) -> Prompt:
        """Return the request for prefill and decode, with its content if it is needed."""
        if attempt.without_prefill:
            request.record.add_degraded("prefill-local")
        encoded_items = attempt.encoded_items or ()
        if request.items:
            prompt = media_prompt(
                request,
                attempt,
                encoded_items,
                self._transfer,
                has_decode=self._table.has(Role.DECODE),
            )
        else:
            prompt = Prompt(request.body, work=Work(request.text_bytes // BYTES_PER_TOKEN))
        if not self._by_content:
            return prompt
        prefix = request_prefix(request, encoded_items)
        if prefix.links and request.config.kv_events:
            prompt = marked_prompt(prompt, prefix)
        return prompt._replace(prefix=prefix)
