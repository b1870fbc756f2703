"""Answer to a chat request, and its differences from another answer."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

TOLERANCES: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 5e-2}
"""Largest accepted difference of log-probabilities, by the data type of the engines.

In bfloat16, the log-probabilities of one engine vary with the other requests in its batch.
"""
USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a chat request.

    Attributes:
        status: HTTP status; 0 without an answer.
        tokens: generated tokens.
        logprobs: log-probability of each token.
        finish: finish reason.
        usage: numbers of used tokens.
        error: message of an error.
        items: header `x-epd-items`; empty without a proxy.
        seconds: duration, in seconds.
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
        """Return whether the answer rejects the request as invalid (4xx)."""
        return 400 <= self.status < 500  # noqa: PLR2004 - the statuses of such answers


def differences(expected: Answer, got: Answer, tolerance: float) -> Iterator[str]:
    """Yield the differences between two answers."""
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


def read_events(content: bytes) -> Iterable[Any]:
    """Yield the events of a stream, each in one line, without its end."""
    for line in content.splitlines():
        data = line.removeprefix(b"data: ")
        if data not in (line, b"[DONE]"):
            yield orjson.loads(data)


def read_answer(events: Iterable[Any], items: str, seconds: float) -> Answer:
    """Build an answer from its chunks, or from its only one."""
    tokens: list[str] = []
    logprobs: list[float] = []
    usage: dict[str, int] = {}
    finish = ""
    for event in events:
        if "error" in event or "choices" not in event:
            error = str(event.get("error", event))[:200]
            return Answer(500, error=error, items=items, seconds=seconds)
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            finish = choice.get("finish_reason") or finish
            for token in (choice.get("logprobs") or {}).get("content") or ():
                tokens.append(token["token"])
                logprobs.append(token["logprob"])
    return Answer(200, tokens, logprobs, finish, usage, "", items, seconds)
