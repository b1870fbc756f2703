"""Pipeline of a request: encode, optional prefill, decode; retried until its answer has begun."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from epd.api.prompts import BYTES_PER_TOKEN, prompt_tokens
from epd.encoder_cache.claims import end_claims
from epd.encoder_cache.keys import Keys
from epd.errors import NoInstance, ProxyError
from epd.media.fetch import MediaFetcher
from epd.policies.policy import Course, Facts
from epd.request.attempt import Attempt, Target
from epd.request.choices import Choices
from epd.request.early_choice import EarlyChoice
from epd.request.encode import Encoder
from epd.request.prefill_decode import DecodeAnswer, PrefillDecodeRunner
from epd.request.prefix import marked_prompt, request_prefix
from epd.request.quarantine import Quarantine
from epd.request.recovery import MAX_ATTEMPTS, FailedAttempt, next_attempt
from epd.request.request import Request
from epd.request.request_media import keyed_request, media_prompt
from epd.routing.fatal import FatalRequests
from epd.routing.instances import ANSWERING, Instance, Role
from epd.routing.retries import Retries
from epd.routing.table import InstanceTable, Work
from epd.transfer.ec import ECTransfer
from epd.transfer.encoded import EncodedItem, Prompt

Coordinate = Callable[[Facts], tuple[str, Course] | None]
"""Returns the deciding policy and the course of a request; None if no policy decides."""


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """Pipeline that runs requests through the stages.

    `_early_choice` is None without a store and without pushed outputs. `_by_content` tells whether
    instances are chosen by the content of prompts.
    """

    _table: InstanceTable
    _coordinate: Coordinate
    _fetcher: MediaFetcher | None
    _keys: Keys
    _transfer: ECTransfer
    _encoder: Encoder
    _prefill_decode: PrefillDecodeRunner
    _early_choice: EarlyChoice | None
    _choices: Choices
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
        client_decode = self._choices.client_decode(request)
        course = self._choose_course(request, client_decode)
        if request.items:
            request = await keyed_request(request, self._keys, self._fetcher)
        self._fatal.check(request.watched, [item.identity for item in request.items])
        attempt, first_error = Attempt(request, course, [], client_decode), None
        try:
            async with self._quarantine.context_for(request.watched):
                with self._retries.tries(MAX_ATTEMPTS) as tries:
                    while True:
                        result = await self._run_attempt(attempt)
                        if isinstance(result, DecodeAnswer):
                            return result
                        if (successor := next_attempt(result)) is None:
                            raise result.error.after(first_error or result.error)  # noqa: TRY301
                        await tries.next_try(result.error)
                        request.record.add_retry()
                        attempt, first_error = successor, first_error or result.error
                        del result  # the failed attempt has bodies, and the next may take long
        except BaseException:
            end_claims(attempt.consumer_claims, entries_coming=False)
            raise

    async def _run_attempt(self, attempt: Attempt) -> DecodeAnswer | FailedAttempt:
        """Send a request through its stages once: encode, prefill, decode."""
        request, prefill_decode = attempt.request, self._prefill_decode
        prefill, decode, reads_back = None, None, False
        try:
            if attempt.course.prefill and not self._table.has(Role.PREFILL):
                local = request.config.on_prefill_failure == "local"
                attempt = attempt._replace(without_prefill=local)
            if request.items:
                attempt = await self._encode_items(attempt)
            attempt = attempt._replace(prompt=self._prompt(attempt))
            first = attempt.target.first
            if first is None:
                first = await prefill_decode.choose_first(attempt)
            if first.instance.role is not Role.PREFILL:
                decode = first.instance
                return await prefill_decode.decode(attempt, decode, first.rank)
            prefill = first.instance
            handover = await prefill_decode.prepare(attempt, first)
            reads_back = handover.earlier is not None
            if handover.concurrent:
                decode = prefill_decode.choose_decode(attempt, handover)
                return await prefill_decode.prefill_and_decode(attempt, handover, decode)
            prefilled = await prefill_decode.prefill(attempt, handover)
            # Prefill's blocks are released unless a decode instance accepts them.
            decode = prefill_decode.choose_decode(attempt, handover, prefilled)
            return await prefill_decode.decode(attempt, decode, prefilled=prefilled)
        except ProxyError as error:
            others = self._choices.has_untried(attempt, error.stage, prefill, decode)
            return FailedAttempt(attempt, error, others, prefill, decode, reads_back)

    async def encode(self, request: Request) -> list[EncodedItem]:
        """Encode the items of a request that asks for nothing else, and remember their keys.

        Raises:
            BadRequest: an item is invalid.
            ProxyError: an item failed.
        """
        request = await keyed_request(request, self._keys, self._fetcher)
        self._fatal.check(request.watched, [item.identity for item in request.items])
        target = Target() if self._early_choice is None else self._early_choice.target()
        async with self._quarantine.context_for(request.watched):
            attempt = Attempt(request, Course(), [], target=target)
            encoded_items = await self._encoder.encode(attempt)
        await self._keys.remember_names(request.body, encoded_items, request.tenant, request.config)
        return encoded_items

    async def _encode_items(self, attempt: Attempt) -> Attempt:
        """Return the attempt with its target and the outputs of its items.

        The items are encoded, unless the target reads what an earlier attempt encoded.
        """
        request, early, earlier = attempt.request, self._early_choice, attempt.target
        target = Target() if early is None else await early.choose_target(attempt)
        reader = None if attempt.encoded_items is None else target.with_outputs_of(earlier)
        if reader is not None:
            return attempt._replace(target=reader)
        attempt = attempt._replace(target=target)
        if attempt.consumer_claims:  # of an earlier consumer, which reads elsewhere
            end_claims(attempt.consumer_claims, entries_coming=False)
        with target.consumer or nullcontext():
            encoded_items = await self._encoder.encode(attempt)
            if attempt.encoded_items is None:
                items = [each for each in encoded_items if each.item.uuid is not None]
                if items:
                    await self._keys.remember_names(
                        request.body, items, request.tenant, request.config
                    )
        return attempt._replace(encoded_items=encoded_items)

    def _choose_course(self, request: Request, client_decode: Instance | None) -> Course:
        """Return the course of a request, as the policies decide it.

        Raises:
            NoInstance: no policy applies to the request.
        """
        roles = self._table.roles
        if client_decode is not None and roles.isdisjoint(ANSWERING):
            roles |= {Role.DECODE}
        facts = Facts(
            request.endpoint.path,
            request.endpoint.can_prefill(request.body),
            len(request.items),
            roles,
            partial(prompt_tokens, request.body),
            request.client_headers,
        )
        if (decision := self._coordinate(facts)) is None:
            if facts.roles.isdisjoint(ANSWERING):
                raise NoInstance("there is no decode instance: register one", slug="no_decode")
            raise NoInstance("no policy decides where this request runs", slug="no_policy")
        policy, course = decision
        request.record.add_policy(policy)
        return course if facts.prefills else course._replace(prefill=False)

    def _prompt(self, attempt: Attempt) -> Prompt:
        """Return the request for prefill and decode, with its content if it is needed."""
        request, encoded_items = attempt.request, attempt.encoded_items or ()
        if attempt.without_prefill:
            request.record.add_degraded("prefill-local")
        if request.items:
            has_decode = self._table.has(Role.DECODE)
            prompt = media_prompt(attempt, self._transfer, has_decode=has_decode)
        else:
            prompt = Prompt(request.body, work=Work(request.text_bytes // BYTES_PER_TOKEN))
        if not self._by_content:
            return prompt
        prefix = request_prefix(request, encoded_items)
        if prefix.links and request.config.kv_events:
            prompt = marked_prompt(prompt, prefix)
        return prompt._replace(prefix=prefix)
