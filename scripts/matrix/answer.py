"""An answer, and how it differs from another."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

TOLERANCES: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 5e-2}
"""How much log-probabilities may differ, by what engines compute in. In bfloat16 one engine's own
differ with what else is in its batch."""
USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a chat request.

    Attributes:
        status: its HTTP status; 0: there was none.
        tokens: its tokens.
        logprobs: the log-probability of each.
        finish: why it ended.
        usage: how many tokens were used.
        error: the message, where it is an error.
        items: the header `x-epd-items`, empty without a proxy.
        seconds: how long it took.
    """

    status: int
    tokens: Sequence[str] = ()
    logprobs: Sequence[float] = ()
    finish: str = ""
    usage: Mapping[str, int] = field(default_factory=dict)
    error: str = ""
    items: str = ""
    seconds: float = 0.0

    @property
    def is_refusal(self) -> bool:
        """Whether it says that the request cannot be answered."""
        return 400 <= self.status < 500  # noqa: PLR2004 - the statuses of such answers


def differences(expected: Answer, got: Answer, tolerance: float) -> Iterator[str]:
    """Yield what of an answer is not as expected.

    Args:
        expected: the answer of one engine.
        got: the answer through the proxy.
        tolerance: how much log-probabilities may differ.
    """
    if got.status != expected.status:
        yield f"status {got.status}, not {expected.status}: {got.error or expected.error}"
        return
    if got.tokens != expected.tokens:
        yield "tokens"
    elif got.logprobs:
        farthest = max(abs(a - b) for a, b in zip(got.logprobs, expected.logprobs, strict=True))
        if farthest > tolerance:
            yield f"log-probabilities, by {farthest:.3g}"
    if got.finish != expected.finish:
        yield f"finish reason {got.finish}, not {expected.finish}"
    if any(got.usage.get(name) != expected.usage.get(name) for name in USAGE):
        yield "usage"
