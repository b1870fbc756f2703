"""Attempts of a request, and the recovery tables, which decide what follows a failure. Pure.

The first row that applies decides. `scripts/recovery_table.py` writes both tables into
docs/decisions/011-trying-again.md.
"""

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Generic, NamedTuple, TypeVar

from epd.errors import MediaFetchFailed, ProxyError, Stage, UpstreamTimeout, UpstreamUnreachable
from epd.policies.plan import Course, Facts
from epd.routing.instances import Instance
from epd.transfer.encoded import EncodedItem, Prompt
from epd.transfer.kv import Handover

MAX_PREFILLS = 2
"""Failures of prefill after which it is not retried; unreachable instances do not count."""

MAX_DECODES = 2
"""Failures of decode after which it is not retried; unreachable instances do not count."""

MAX_ATTEMPTS = 6 + MAX_PREFILLS + MAX_DECODES
"""Six more attempts are possible: after a prefill that could not read the blocks of an earlier
turn, after an instance rejected metadata in place of media, after a lost entry, without the names
of media, at the prefill instance that lacked an entry, and at a decode instance that lacked
blocks."""

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


class Encodings(NamedTuple):
    """One encoder output for each item of a request, and the consumer's namespace, if known."""

    encoded_items: Sequence[EncodedItem] = ()
    namespace: str | None = None


NO_ENCODINGS = Encodings()


class Attempt(NamedTuple):
    """How a request is sent once. `next_attempt` derives the next one.

    Attributes:
        facts: facts by which the policies decided the course.
        avoided_prefills: prefill instances to which any other is preferred: they were chosen
            before, and may be at fault.
        avoided_decodes: decode instances to which any other is preferred, for the same reason.
        failures: stages that failed before. An unreachable instance does not count.
        doubtful: an instance that may have failed because of a missing entry or block, so that an
            earlier stage may be at fault.
        encodings: encoder outputs of an earlier attempt.
        resent: whether a prefill instance had the request before. The request then gets a new id,
            because connectors must not confuse the attempts.
        reencode: whether entries may be lost: items without outputs of an earlier attempt are
            encoded although they are stored, and the media are sent too.
        raw: whether all media are sent, because an instance rejected the metadata in their place.
        unnamed: whether all media are sent without names, so that the consumer encodes them: it
            may have cached a name without its media, and lack the entry.
        without_prefill: whether decode does prefill's work.
    """

    course: Course
    facts: Facts
    avoided_prefills: tuple[Instance, ...] = ()
    avoided_decodes: tuple[Instance, ...] = ()
    failures: tuple[Stage, ...] = ()
    doubtful: Instance | None = None
    encodings: Encodings | None = None
    resent: bool = False
    reencode: bool = False
    raw: bool = False
    unnamed: bool = False
    without_prefill: bool = False


NO_PROMPT = Prompt({})


class FailedAttempt(NamedTuple):
    """Failed attempt: what its steps before the failure gathered, and the remaining options.

    Attributes:
        encodings: encoder outputs of the items; None if a step up to the encode failed.
        prompt: the request for prefill and decode; `NO_PROMPT` until the items are encoded.
        prefill: the prefill instance that was chosen; None if none was.
        handover: the prefill instance with its facts for decode; None until it is made.
        decode: the decode instance that was chosen; None if none was.
        other_prefills: whether there is a prefill instance that has not had the request.
        other_decodes: whether there is such a decode instance.
        may_prefill_locally: whether decode may do prefill's work (`--on-prefill-failure local`).
    """

    attempt: Attempt
    error: ProxyError
    encodings: Encodings | None = None
    prompt: Prompt = NO_PROMPT
    prefill: Instance | None = None
    handover: Handover | None = None
    decode: Instance | None = None
    other_prefills: bool = False
    other_decodes: bool = False
    may_prefill_locally: bool = False

    @property
    def tried_prefills(self) -> tuple[Instance, ...]:
        """The prefill instances that this attempt avoids, and the one that was chosen in it."""
        avoided = self.attempt.avoided_prefills
        return avoided if self.prefill is None else (*avoided, self.prefill)

    @property
    def failed_decodes(self) -> tuple[Instance, ...]:
        """The decode instances that this attempt avoids, and the one that failed in it."""
        avoided, decode = self.attempt.avoided_decodes, self.decode
        return avoided if decode is None or self.error.stage != "decode" else (*avoided, decode)

    def failed_at(self, stage: Stage) -> bool:
        return self.error.stage == stage

    @property
    def failures(self) -> tuple[Stage, ...]:
        """The stages that have failed, including this one if its instance was reached."""
        before = self.attempt.failures
        unreached = isinstance(self.error, UpstreamUnreachable)
        return before if unreached else (*before, self.error.stage)

    @property
    def reads_back(self) -> bool:
        """Whether prefill was asked to read decode's blocks of the previous turn."""
        return self.handover is not None and self.handover.earlier is not None

    @property
    def can_repeat(self) -> bool:
        """Whether an instance of the failed stage may succeed."""
        others = self.other_prefills if self.failed_at("prefill") else self.other_decodes
        return retry_delay_s(self.error, others=others) is not None

    @property
    def base_attempt(self) -> Attempt:
        """The next attempt, unless a rule changes more: it avoids the instances chosen before."""
        attempt, decodes, doubtful = self.attempt, self.failed_decodes, self.attempt.doubtful
        if self.error.engine_failed and self.failed_at("decode"):
            doubtful = decodes[-1]
        elif self.error.engine_failed and self.prompt.depends:
            doubtful = self.prefill
        return attempt._replace(
            avoided_prefills=self.tried_prefills,
            avoided_decodes=decodes,
            failures=self.failures,
            doubtful=doubtful,
            # An attempt that failed before its encode has no encoder outputs to reuse.
            encodings=attempt.encodings if self.encodings is None else self.encodings,
            resent=attempt.resent or self.prefill is not None,
        )


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
    attempt, encodings = failure.attempt, failure.encodings
    return (
        failure.error.answered == HTTPStatus.BAD_REQUEST
        and len(failure.prompt.bare) > 0
        and not (attempt.raw or attempt.reencode)
        and encodings is not None
        and all(encoded_item.item.has_media for encoded_item in encodings.encoded_items)
    )


def _media_lost(failure: FailedAttempt) -> bool:
    """Return whether the consumer may have had neither an entry nor, in its cache, the media."""
    prefills = failure.failures.count("prefill")
    if failure.failed_at("prefill") and prefills >= MAX_PREFILLS and failure.may_prefill_locally:
        return False
    consumer_failed = failure.failed_at("prefill") or failure.handover is None
    lost = consumer_failed and failure.error.engine_failed and not failure.error.died
    prompt = failure.prompt
    return lost and prompt.named and not (prompt.depends or failure.attempt.unnamed)


def _prefill_again(failure: FailedAttempt) -> bool:
    few = failure.failures.count("prefill") < MAX_PREFILLS
    # Unreachable instances do not count, but the attempts at decode are reserved.
    chosen = len(failure.attempt.avoided_prefills) + 1
    few &= chosen < MAX_ATTEMPTS - MAX_DECODES or not failure.may_prefill_locally
    # Not on the only instance, which has just died of the request, if decode can prefill.
    only = failure.error.died and not failure.other_prefills and failure.may_prefill_locally
    return failure.failed_at("prefill") and few and not only and failure.can_repeat


def _may_decode_again(failure: FailedAttempt) -> bool:
    return failure.failed_at("decode") and failure.failures.count("decode") < MAX_DECODES


def _doubtful_prefill_is_left(failure: FailedAttempt) -> bool:
    attempt = failure.attempt
    left = attempt.doubtful in attempt.avoided_prefills and not failure.error.engine_failed
    return failure.failed_at("prefill") and failure.error.retryable and left


def _doubtful_decode_is_left(failure: FailedAttempt) -> bool:
    attempt, late = failure.attempt, isinstance(failure.error, UpstreamTimeout)
    left = attempt.doubtful in attempt.avoided_decodes and not failure.error.engine_failed
    return failure.failed_at("decode") and failure.error.retryable and left and not late


def _encoded_again(failure: FailedAttempt) -> Attempt:
    """Return the next attempt, which does not reuse the encoder outputs.

    The instance that lacked one is not avoided if all others have had the request: they failed for
    other reasons.
    """
    attempt = failure.base_attempt._replace(reencode=True, encodings=None)
    before = failure.attempt
    if failure.failed_at("prefill") and not failure.other_prefills:
        return attempt._replace(avoided_prefills=before.avoided_prefills)
    if failure.failed_at("decode") and not failure.other_decodes:
        return attempt._replace(avoided_decodes=before.avoided_decodes)
    return attempt


def _not_counted(failure: FailedAttempt) -> Attempt:
    """Return the next attempt, without counting this one as a failure of its stage."""
    return failure.base_attempt._replace(failures=failure.attempt.failures)


def _without_doubt(failure: FailedAttempt) -> Attempt:
    attempt = failure.base_attempt
    prefills, decodes = (
        tuple(instance for instance in avoided if instance != attempt.doubtful)
        for avoided in (attempt.avoided_prefills, attempt.avoided_decodes)
    )
    return attempt._replace(avoided_prefills=prefills, avoided_decodes=decodes, doubtful=None)


RULES: Sequence[Rule[FailedAttempt, Attempt]] = (
    Rule(
        "prefill fails while it reads decode's blocks of the previous turn",
        "prefill computes them; the same instance may be chosen",
        lambda failure: (
            failure.failed_at("prefill") and failure.reads_back and failure.error.worked
        ),
        lambda failure: _not_counted(failure)._replace(
            avoided_prefills=failure.attempt.avoided_prefills,
            doubtful=failure.attempt.doubtful,
        ),
    ),
    Rule(
        "prefill or decode answers 400 to metadata in place of media",
        "the request is sent again with its media",
        _metadata_refused,
        lambda failure: _not_counted(failure)._replace(raw=True),
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
        lambda failure: failure.base_attempt._replace(
            unnamed=True, doubtful=failure.attempt.doubtful
        ),
    ),
    Rule(
        f"prefill fails, fewer than {MAX_PREFILLS} times, and an instance may succeed",
        "another prefill instance, or the only one; with `--on-prefill-failure local`, "
        f"{MAX_ATTEMPTS - MAX_DECODES} are chosen at most",
        _prefill_again,
        lambda failure: failure.base_attempt,
    ),
    Rule(
        "prefill fails, and another instance may have failed only because an entry was lost",
        "that other prefill instance, because the entry has been encoded again",
        _doubtful_prefill_is_left,
        _without_doubt,
    ),
    Rule(
        "prefill fails otherwise, with `--on-prefill-failure local`",
        "decode prefills the request itself",
        lambda failure: (
            failure.failed_at("prefill") and failure.may_prefill_locally and failure.error.retryable
        ),
        lambda failure: failure.base_attempt._replace(without_prefill=True),
    ),
    Rule(
        f"decode answers 500 after a prefill, fewer than {MAX_DECODES} times",
        "prefill and decode again: the KV blocks may have been lost",
        # As with vLLM's `kv_load_failure_policy` "fail".
        lambda failure: (
            _may_decode_again(failure)
            and failure.error.engine_failed
            and failure.handover is not None
        ),
        lambda failure: failure.base_attempt,
    ),
    Rule(
        f"decode fails, fewer than {MAX_DECODES} times, and one may succeed",
        "another decode instance, or the only one, but not after a timeout",
        lambda failure: _may_decode_again(failure) and failure.can_repeat,
        lambda failure: failure.base_attempt,
    ),
    Rule(
        "decode fails without a timeout, and another may have failed only because of lost state",
        "that other decode instance, because entry or KV blocks have been computed again",
        _doubtful_decode_is_left,
        _without_doubt,
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
