"""Recovery of a request: the table that decides what follows a failed attempt. Pure.

The first row that applies decides. `scripts/recovery_table.py` writes the table into
docs/decisions/011-trying-again.md.
"""

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from epd.errors import ProxyError, Stage, UpstreamTimeout, UpstreamUnreachable
from epd.request.attempt import NO_PROMPT, Attempt, SendForm
from epd.routing.instances import Instance

MAX_FAILURES = 2
"""Failures of prefill, and of decode, after which the stage is not retried; unreachable instances
do not count."""

MAX_ATTEMPTS = 6 + 2 * MAX_FAILURES
"""Maximum number of attempts of a request: the failures of both stages, and one attempt more for
each other row of `RULES`."""


class FailedAttempt(NamedTuple):
    """Failed attempt.

    Attributes:
        prefill: the prefill instance that was chosen; None without prefill, or before its choice.
        decode: the decode instance that was chosen; None before its choice.
        reads_back: whether prefill was asked to read the blocks of the previous turn.
        others: whether there is an instance of the failed stage that has not had the request.
    """

    attempt: Attempt
    error: ProxyError
    others: bool
    prefill: Instance | None = None
    decode: Instance | None = None
    reads_back: bool = False

    @property
    def at_prefill(self) -> bool:
        """Whether prefill failed, and not decode."""
        return self.error.stage == "prefill"

    @property
    def prefill_replaceable(self) -> bool:
        """Whether prefill failed, and decode may do its work (`--on-prefill-failure local`)."""
        config = self.attempt.request.config
        return self.at_prefill and config.on_prefill_failure == "local"

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

    def successor(self, **changes: Any) -> Attempt:
        """Return the next attempt with these changes. It avoids the instances chosen before."""
        attempt, doubtful = self.attempt, self.attempt.doubtful
        prefills = attempt.tried_prefills(self.prefill)
        decodes = attempt.tried_decodes(None if self.at_prefill else self.decode)
        if self.error.engine_failed and not self.at_prefill:
            doubtful = decodes[-1]
        elif self.error.engine_failed and attempt.prompt.depends:
            doubtful = prefills[-1]
        values: dict[str, Any] = {
            "avoided_prefills": prefills,
            "avoided_decodes": decodes,
            "failures": self.failures,
            "doubtful": doubtful,
            "resent": attempt.resent or self.prefill is not None,
            "prompt": NO_PROMPT,
        }
        return attempt._replace(**values | changes)


class Rule(NamedTuple):
    """Row of the table. `condition` and `follows` are its text in the document."""

    condition: str
    follows: str
    applies: Callable[[FailedAttempt], bool]
    next: Callable[[FailedAttempt], Attempt]


def _metadata_refused(failure: FailedAttempt) -> bool:
    attempt = failure.attempt
    return (
        failure.error.answered == HTTPStatus.BAD_REQUEST
        and len(attempt.prompt.bare) > 0
        and attempt.form is SendForm.METADATA
        and all(encoded_item.item.has_media for encoded_item in attempt.encoded_items or ())
    )


def _media_lost(failure: FailedAttempt) -> bool:
    """Return whether the consumer may have had neither an entry nor, in its cache, the media."""
    attempt, prompt = failure.attempt, failure.attempt.prompt
    if failure.prefill_replaceable and failure.stage_failures >= MAX_FAILURES:
        return False
    consumer_failed = failure.at_prefill or failure.prefill is None
    lost = consumer_failed and failure.error.engine_failed and not failure.error.died
    is_sent_unnamed = attempt.form is SendForm.UNNAMED
    return lost and prompt.named and not (prompt.depends or is_sent_unnamed)


def _stage_again(failure: FailedAttempt) -> bool:
    """Return whether the failed stage has tries left, and an instance of it may succeed."""
    error, attempt = failure.error, failure.attempt
    if failure.stage_failures >= MAX_FAILURES:
        return False
    if failure.prefill_replaceable:
        # Unreachable instances do not count, but the attempts at decode are reserved.
        reserved = len(attempt.avoided_prefills) + 1 >= MAX_ATTEMPTS - MAX_FAILURES
        # Not on the only instance, which has just died of the request.
        if reserved or (error.died and not failure.others):
            return False
    # After a prefill, KV blocks may be lost, as with vLLM's `kv_load_failure_policy` "fail".
    if error.engine_failed and not failure.at_prefill and failure.prefill is not None:
        return True
    return error.retry_delay_s(others=failure.others) is not None


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
    attempt = failure.successor(form=form, reencode=True, encoded_items=None)
    if failure.others:
        return attempt
    if failure.at_prefill:
        return attempt._replace(avoided_prefills=before.avoided_prefills)
    return attempt._replace(avoided_decodes=before.avoided_decodes)


def _without_doubt(failure: FailedAttempt) -> Attempt:
    attempt, doubtful = failure.successor(doubtful=None), failure.attempt.doubtful
    prefills, decodes = (
        tuple(instance for instance in avoided if instance != doubtful)
        for avoided in (attempt.avoided_prefills, attempt.avoided_decodes)
    )
    return attempt._replace(avoided_prefills=prefills, avoided_decodes=decodes)


RULES: Sequence[Rule] = (
    Rule(
        "prefill fails while it reads decode's blocks of the previous turn",
        "prefill computes them; the same instance may be chosen",
        lambda failure: failure.at_prefill and failure.error.worked and failure.reads_back,
        lambda failure: failure.successor(
            failures=failure.attempt.failures,
            avoided_prefills=failure.attempt.avoided_prefills,
            doubtful=failure.attempt.doubtful,
        ),
    ),
    Rule(
        "prefill or decode answers 400 to metadata in place of media",
        "the request is sent again with its media",
        _metadata_refused,
        lambda failure: failure.successor(failures=failure.attempt.failures, form=SendForm.MEDIA),
    ),
    Rule(
        "prefill or decode answers 500 to a request that names encoder outputs, the first time",
        "all items are encoded again, and their media are sent too",
        lambda failure: (
            failure.error.engine_failed
            and failure.attempt.prompt.depends
            and not failure.attempt.reencode
        ),
        _encoded_again,
    ),
    Rule(
        "prefill or decode answers 500 to media that are sent under names",
        "the media are sent without names: an instance that has cached a name without its media, "
        "and cannot read the entry, encodes them",
        _media_lost,
        lambda failure: failure.successor(form=SendForm.UNNAMED, doubtful=failure.attempt.doubtful),
    ),
    Rule(
        f"prefill or decode fails, fewer than {MAX_FAILURES} times, and an instance may succeed, "
        "or decode may have lost its KV blocks: it answered 500 after a prefill",
        "another instance, or the only one, of decode not after a timeout; with "
        f"`--on-prefill-failure local`, {MAX_ATTEMPTS - MAX_FAILURES} prefill instances are "
        "chosen at most",
        _stage_again,
        FailedAttempt.successor,
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
        lambda failure: failure.prefill_replaceable and failure.error.retryable,
        lambda failure: failure.successor(without_prefill=True),
    ),
)
"""Rows in order of precedence. The client receives failures of other stages, and failures without a
row."""


def next_attempt(failure: FailedAttempt) -> Attempt | None:
    """Return the attempt that follows a failure; None: the client gets the error."""
    if failure.attempt.request.is_spent or failure.error.stage not in {"prefill", "decode"}:
        return None
    return next((rule.next(failure) for rule in RULES if rule.applies(failure)), None)
