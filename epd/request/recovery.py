"""Attempts of a request, and the recovery tables, which decide what follows a failure. Pure.

The first row that applies decides. `scripts/recovery_table.py` writes both tables into
docs/decisions/011-trying-again.md.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from http import HTTPStatus
from typing import Any, Generic, NamedTuple, TypeVar

from epd.errors import MediaFetchFailed, ProxyError, Stage, UpstreamTimeout, UpstreamUnreachable
from epd.policies.plan import Course
from epd.request.request import Request
from epd.routing.instances import Instance
from epd.transfer.encoded import EncodedItem, Prompt

MAX_FAILURES = 2
"""Failures of prefill, and of decode, after which the stage is not retried; unreachable instances
do not count."""

MAX_ATTEMPTS = 6 + 2 * MAX_FAILURES
"""Maximum number of attempts of a request: the failures of both stages, and one attempt more for
each other row of `RULES`."""

MAX_ENCODES = 3
"""Maximum number of tries of one item. The same instance may have several of them."""

MAX_500S = 2
"""Maximum number of tries of one item that end in a 500."""

FETCH_AGAIN_S = 2.0
"""Time within which a failed fetch of an item's URL is retried on one more instance, in seconds.

Instances that repeat fetches themselves take longer (`VLLM_MEDIA_FETCH_MAX_RETRIES`).
"""


def retry_delay_s(error: ProxyError, *, others: bool, patience_s: float = 0.0) -> float | None:
    """Return the delay before the next request after this error; None for no further request.

    `others` is whether there is an untried instance. If there is none, the proxy waits for a
    `Retry-After` of at most `patience_s` seconds.
    """
    if not error.retryable:
        return None
    if others:
        return 0.0
    if error.rest_s is not None and error.rest_s <= patience_s:
        return error.rest_s
    return 0.0 if error.repeatable else None


NO_PROMPT = Prompt({})


class SendForm(IntEnum):
    """Form in which items are sent to prefill and decode. A retry may need a later one."""

    METADATA = 0
    """Placeholder metadata, if they are enough for the answer (`consumer_body`)."""
    MEDIA = 1
    """All media: an instance rejected their metadata, or entries may be lost."""
    UNNAMED = 2
    """All media without names, so that the consumer encodes them: it may have cached a name without
    its media, and lack the entry."""


class Attempt(NamedTuple):
    """How a request is sent once. `next_attempt` makes the next one of a failed one.

    Attributes:
        request: the client's request, with the keys of its items.
        client_decode: the decode instance that the client names; None for any.
        avoided_prefills: prefill instances to which any other is preferred: they were chosen
            before, and may be at fault.
        avoided_decodes: decode instances to which any other is preferred, for the same reason.
        failures: stages that failed before. An unreachable instance does not count.
        doubtful: an instance that may have failed because of a missing entry or block, so that an
            earlier stage may be at fault.
        resent: whether a prefill instance had the request before. The request then gets a new id,
            because connectors must not confuse the attempts.
        form: form in which items are sent.
        reencode: whether entries may be lost: items without outputs of an earlier attempt are
            encoded although they are stored.
        without_prefill: whether decode does prefill's work.
        encoded_items: an encoder output for each item, from this attempt or an earlier one; None
            before the first encode.
        namespace: namespace of the consumer for which they were encoded, if known.
        host: address of the server of that consumer's host, if each host has a memory.
        worth: worth of a consumer for this attempt, by the entries of its host; None: all have the
            same.
    """

    request: Request
    course: Course
    client_decode: Instance | None = None
    avoided_prefills: tuple[Instance, ...] = ()
    avoided_decodes: tuple[Instance, ...] = ()
    failures: tuple[Stage, ...] = ()
    doubtful: Instance | None = None
    resent: bool = False
    form: SendForm = SendForm.METADATA
    reencode: bool = False
    without_prefill: bool = False
    encoded_items: Sequence[EncodedItem] | None = None
    namespace: str | None = None
    host: str | None = None
    worth: Callable[[Instance], float] | None = None

    @property
    def local_identities(self) -> Sequence[str]:
        """Identities of the items that prefill or decode encode themselves."""
        items = self.encoded_items or ()
        return [known.item.identity for known in items if known.result == "local"]


class FailedAttempt(NamedTuple):
    """Failed attempt.

    Attributes:
        prompt: the request for prefill and decode; `NO_PROMPT` if it failed before.
        prefill: the prefill instance that was chosen; None without prefill, or before its choice.
        decode: the decode instance that was chosen; None before its choice.
        reads_back: whether prefill was asked to read the blocks of the previous turn.
        others: whether there is an instance of the failed stage that has not had the request.
        may_prefill_locally: whether decode may do prefill's work (`--on-prefill-failure local`).
    """

    attempt: Attempt
    error: ProxyError
    prompt: Prompt = NO_PROMPT
    prefill: Instance | None = None
    decode: Instance | None = None
    reads_back: bool = False
    others: bool = False
    may_prefill_locally: bool = False

    @property
    def at_prefill(self) -> bool:
        """Whether prefill failed, and not decode."""
        return self.error.stage == "prefill"

    @property
    def failures(self) -> tuple[Stage, ...]:
        """The stages that have failed, including this one if its instance was reached."""
        before = self.attempt.failures
        unreached = isinstance(self.error, UpstreamUnreachable)
        return before if unreached else (*before, self.error.stage)

    @property
    def stage_failures(self) -> int:
        """Number of failures of the failed stage."""
        return self.failures.count(self.error.stage)

    @property
    def tried_prefills(self) -> tuple[Instance, ...]:
        """The avoided prefill instances, and the one that was chosen."""
        avoided, chosen = self.attempt.avoided_prefills, self.prefill
        return avoided if chosen is None else (*avoided, chosen)

    @property
    def tried_decodes(self) -> tuple[Instance, ...]:
        """The avoided decode instances, and the one that was chosen."""
        avoided, chosen = self.attempt.avoided_decodes, self.decode
        return avoided if chosen is None else (*avoided, chosen)

    def following(self, **changes: Any) -> Attempt:
        """Return the next attempt with these changes. It avoids the instances chosen before."""
        attempt, doubtful = self.attempt, self.attempt.doubtful
        prefills, decodes = self.tried_prefills, attempt.avoided_decodes
        if not self.at_prefill:
            decodes = self.tried_decodes
        if self.error.engine_failed and not self.at_prefill:
            doubtful = decodes[-1]
        elif self.error.engine_failed and self.prompt.depends:
            doubtful = prefills[-1]
        values: dict[str, Any] = {
            "avoided_prefills": prefills,
            "avoided_decodes": decodes,
            "failures": self.failures,
            "doubtful": doubtful,
            "resent": attempt.resent or self.prefill is not None,
        }
        return attempt._replace(**values | changes)


Failure = TypeVar("Failure")
Next = TypeVar("Next")


class Rule(NamedTuple, Generic[Failure, Next]):
    """Row of a table. `condition` and `follows` are its text in the document."""

    condition: str
    follows: str
    applies: Callable[[Failure], bool]
    next: Callable[[Failure], Next]


def _decide(rules: Sequence[Rule[Failure, Next]], failure: Failure) -> Next | None:
    """Return what the first row that applies decides; None without such a row."""
    rule = next((rule for rule in rules if rule.applies(failure)), None)
    return None if rule is None else rule.next(failure)


def _metadata_refused(failure: FailedAttempt) -> bool:
    attempt = failure.attempt
    return (
        failure.error.answered == HTTPStatus.BAD_REQUEST
        and len(failure.prompt.bare) > 0
        and attempt.form is SendForm.METADATA
        and all(encoded_item.item.has_media for encoded_item in attempt.encoded_items or ())
    )


def _media_lost(failure: FailedAttempt) -> bool:
    """Return whether the consumer may have had neither an entry nor, in its cache, the media."""
    prompt = failure.prompt
    replaceable = failure.at_prefill and failure.may_prefill_locally
    if replaceable and failure.stage_failures >= MAX_FAILURES:
        return False
    consumer_failed = failure.at_prefill or failure.prefill is None
    lost = consumer_failed and failure.error.engine_failed and not failure.error.died
    is_sent_unnamed = failure.attempt.form is SendForm.UNNAMED
    return lost and prompt.named and not (prompt.depends or is_sent_unnamed)


def _stage_again(failure: FailedAttempt) -> bool:
    """Return whether the failed stage has tries left, and an instance of it may succeed."""
    error, attempt = failure.error, failure.attempt
    if failure.stage_failures >= MAX_FAILURES:
        return False
    if failure.at_prefill and failure.may_prefill_locally:
        # Unreachable instances do not count, but the attempts at decode are reserved.
        reserved = len(attempt.avoided_prefills) + 1 >= MAX_ATTEMPTS - MAX_FAILURES
        # Not on the only instance, which has just died of the request.
        if reserved or (error.died and not failure.others):
            return False
    # After a prefill, KV blocks may be lost, as with vLLM's `kv_load_failure_policy` "fail".
    if error.engine_failed and not failure.at_prefill and failure.prefill is not None:
        return True
    return retry_delay_s(error, others=failure.others) is not None


def _doubtful_is_left(failure: FailedAttempt) -> bool:
    attempt, error = failure.attempt, failure.error
    avoided = attempt.avoided_prefills if failure.at_prefill else attempt.avoided_decodes
    if not failure.at_prefill and isinstance(error, UpstreamTimeout):
        return False
    return error.retryable and not error.engine_failed and attempt.doubtful in avoided


def _encoded_again(failure: FailedAttempt) -> Attempt:
    """Return the next attempt, which does not reuse the encoder outputs.

    The instance that lacked one is not avoided if all others have had the request: they failed for
    other reasons.
    """
    before = failure.attempt
    form = max(before.form, SendForm.MEDIA)
    attempt = failure.following(form=form, reencode=True, encoded_items=None)
    if failure.others:
        return attempt
    if failure.at_prefill:
        return attempt._replace(avoided_prefills=before.avoided_prefills)
    return attempt._replace(avoided_decodes=before.avoided_decodes)


def _without_doubt(failure: FailedAttempt) -> Attempt:
    attempt, doubtful = failure.following(doubtful=None), failure.attempt.doubtful
    prefills, decodes = (
        tuple(instance for instance in avoided if instance != doubtful)
        for avoided in (attempt.avoided_prefills, attempt.avoided_decodes)
    )
    return attempt._replace(avoided_prefills=prefills, avoided_decodes=decodes)


RULES: Sequence[Rule[FailedAttempt, Attempt]] = (
    Rule(
        "prefill fails while it reads decode's blocks of the previous turn",
        "prefill computes them; the same instance may be chosen",
        lambda failure: failure.at_prefill and failure.error.worked and failure.reads_back,
        lambda failure: failure.following(
            failures=failure.attempt.failures,
            avoided_prefills=failure.attempt.avoided_prefills,
            doubtful=failure.attempt.doubtful,
        ),
    ),
    Rule(
        "prefill or decode answers 400 to metadata in place of media",
        "the request is sent again with its media",
        _metadata_refused,
        lambda failure: failure.following(failures=failure.attempt.failures, form=SendForm.MEDIA),
    ),
    Rule(
        "prefill or decode answers 500 to a request that names encoder outputs, the first time",
        "all items are encoded again, and their media are sent too",
        lambda failure: (
            failure.error.engine_failed and failure.prompt.depends and not failure.attempt.reencode
        ),
        _encoded_again,
    ),
    Rule(
        "prefill or decode answers 500 to media that are sent under names",
        "the media are sent without names: an instance that has cached a name without its media, "
        "and cannot read the entry, encodes them",
        _media_lost,
        lambda failure: failure.following(form=SendForm.UNNAMED, doubtful=failure.attempt.doubtful),
    ),
    Rule(
        f"prefill or decode fails, fewer than {MAX_FAILURES} times, and an instance may succeed, "
        "or decode may have lost its KV blocks: it answered 500 after a prefill",
        "another instance, or the only one, of decode not after a timeout; with "
        f"`--on-prefill-failure local`, {MAX_ATTEMPTS - MAX_FAILURES} prefill instances are "
        "chosen at most",
        _stage_again,
        FailedAttempt.following,
    ),
    Rule(
        "prefill or decode fails, decode without a timeout, and another may have failed only "
        "because of lost state",
        "that other instance, because entry or KV blocks have been computed again",
        _doubtful_is_left,
        _without_doubt,
    ),
    Rule(
        "prefill fails otherwise, with `--on-prefill-failure local`",
        "decode prefills the request itself",
        lambda failure: (
            failure.at_prefill and failure.may_prefill_locally and failure.error.retryable
        ),
        lambda failure: failure.following(without_prefill=True),
    ),
)
"""Rows in order of precedence. The client receives failures of other stages, and failures without a
row."""


def next_attempt(failure: FailedAttempt) -> Attempt | None:
    """Return the attempt that follows a failure; None: the client gets the error."""
    if failure.error.stage not in {"prefill", "decode"}:
        return None
    return _decide(RULES, failure)


class EncodeFailure(NamedTuple):
    """Failed encode of an item.

    Attributes:
        tries: number of instances that received the item.
        server_errors: number of its tries that were answered 500.
        elapsed_s: seconds since the first try.
        others: whether there is an instance that has not had the item.
        falls_back: whether prefill or decode may encode it (`--on-encode-failure local`).
        patience_s: longest `Retry-After` of an instance for which the proxy waits.
    """

    error: ProxyError
    tries: int
    server_errors: int
    elapsed_s: float
    others: bool
    falls_back: bool
    patience_s: float


ENCODE_RULES: Sequence[Rule[EncodeFailure, float | None]] = (
    Rule(
        "the instance could not fetch the item's URL",
        f"one more instance if the fetch failed within {FETCH_AGAIN_S:.0f} s, else the error",
        lambda failure: isinstance(failure.error, MediaFetchFailed),
        lambda failure: 0.0 if failure.tries == 1 and failure.elapsed_s < FETCH_AGAIN_S else None,
    ),
    Rule(
        "the only instance died while it had the item",
        "the same instance once more with `--on-encode-failure fail`, else prefill or decode",
        lambda failure: failure.error.died and failure.error.retryable and not failure.others,
        # Prefill or decode encode the item next. If they may not, it may have been a reset.
        lambda failure: 0.0 if failure.tries == 1 and not failure.falls_back else None,
    ),
    Rule(
        "an instance answered 500",
        "another instance, or with `--on-encode-failure fail` the only one; at most "
        f"{MAX_500S} tries end in a 500",
        lambda failure: failure.error.engine_failed,
        lambda failure: (
            0.0
            if (failure.others or not failure.falls_back) and failure.server_errors < MAX_500S
            else None
        ),
    ),
    Rule(
        "any other failure after which an instance may succeed",
        "another instance; the only one after a failure, or after its `Retry-After`",
        lambda failure: failure.error.retryable,
        lambda failure: retry_delay_s(
            failure.error, others=failure.others, patience_s=failure.patience_s
        ),
    ),
)
"""Rows in order of precedence, with the seconds until the next try, or None to stop. At the end,
prefill or decode encode the item (`--on-encode-failure local`)."""


def encode_delay_s(failure: EncodeFailure) -> float | None:
    """Return the delay before the next try of an item; None for no further try."""
    return _decide(ENCODE_RULES, failure)
