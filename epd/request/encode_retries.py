"""Retries of an item's encode: the table that decides what follows a failed try. Pure.

The first row that applies decides. `scripts/recovery_table.py` writes the table into
docs/decisions/011-trying-again.md.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from epd.errors import MediaFetchFailed, ProxyError

MAX_ENCODES = 3
"""Maximum number of tries of one item. The same instance may have several of them."""

MAX_500S = 2
"""Maximum number of tries of one item that end in a 500."""

FETCH_AGAIN_S = 2.0
"""Time within which a failed fetch of an item's URL is retried on one more instance, in seconds.

Instances that repeat fetches themselves take longer (`VLLM_MEDIA_FETCH_MAX_RETRIES`).
"""


class EncodeFailure(NamedTuple):
    """Failed encode of an item.

    Attributes:
        tries: number of instances that received the item.
        server_errors: number of its tries that were answered 500.
        elapsed_s: seconds since the first try.
        others: whether there is an instance that has not had the item.
        falls_back: whether prefill or decode may encode it (`--on-encode-failure local`).
        patience_s: longest `Retry-After` of an instance for which the proxy waits.
        fetch_again_s: time within which a failed fetch is retried, in seconds.
    """

    error: ProxyError
    tries: int
    server_errors: int
    elapsed_s: float
    others: bool
    falls_back: bool
    patience_s: float
    fetch_again_s: float = FETCH_AGAIN_S


class EncodeRule(NamedTuple):
    """Row of the table. `condition` and `follows` are its text in the document."""

    condition: str
    follows: str
    applies: Callable[[EncodeFailure], bool]
    delay_s: Callable[[EncodeFailure], float | None]


ENCODE_RULES: Sequence[EncodeRule] = (
    EncodeRule(
        "the instance could not fetch the item's URL",
        f"one more instance if the fetch failed within {FETCH_AGAIN_S:.0f} s, else the error",
        lambda failure: isinstance(failure.error, MediaFetchFailed),
        lambda failure: (
            0.0 if failure.tries == 1 and failure.elapsed_s < failure.fetch_again_s else None
        ),
    ),
    EncodeRule(
        "the only instance died while it had the item",
        "the same instance once more with `--on-encode-failure fail`, else prefill or decode",
        lambda failure: failure.error.died and failure.error.retryable and not failure.others,
        # Prefill or decode encode the item next. If they may not, it may have been a reset.
        lambda failure: 0.0 if failure.tries == 1 and not failure.falls_back else None,
    ),
    EncodeRule(
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
    EncodeRule(
        "any other failure after which an instance may succeed",
        "another instance; the only one after a failure, or after its `Retry-After`",
        lambda failure: failure.error.retryable,
        lambda failure: failure.error.retry_delay_s(
            others=failure.others, patience_s=failure.patience_s
        ),
    ),
)
"""Rows in order of precedence, with the seconds until the next try, or None to stop. At the end,
prefill or decode encode the item (`--on-encode-failure local`)."""


def encode_delay_s(failure: EncodeFailure) -> float | None:
    """Return the delay before the next try of an item; None for no further try."""
    return next((rule.delay_s(failure) for rule in ENCODE_RULES if rule.applies(failure)), None)
