"""Figures of a workload in one arm, from its answers. No I/O."""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epd.tools.bench.answer import Answer, differences
from epd.tools.bench.compare.workloads import Workload

SHOWN = 5
"""Number of differences and errors that are kept."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a workload in one arm. NaN: not measured, as in reports of earlier tools.

    Attributes:
        at_once: number of clients.
        prompt_tokens: average length of a prompt.
        ttft_ms: median time to the first token, by kind of request.
        ttft_p99_ms: of all requests.
        items: media items by where their encoder outputs came from; empty: not known.
        distinct: number of different answers.
        compared: number of answers that were compared with those of the first arm.
        equal: number of those with equal tokens, and log-probabilities within the tolerance.
        farthest: largest difference of log-probabilities of answers with equal tokens.
        others: share of the machine's cores that other programs used.
        notes: first differences and errors.
    """

    at_once: int
    asked: int
    failed: int
    seconds: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens: float
    ttft_ms: Mapping[str, float]
    ttft_p50_ms: float
    ttft_p99_ms: float
    items: Mapping[str, int]
    distinct: int
    compared: int
    equal: int
    farthest: float
    others: float
    notes: Sequence[str]


def figures_of(  # noqa: PLR0913, PLR0917 - all that figures depend on
    workload: Workload,
    answers: Sequence[Answer],
    seconds: float,
    others: float,
    expected: Sequence[Answer] | None,
    tolerance: float,
) -> Figures:
    """Return the figures of a workload; `expected` has the answers of the first arm."""
    asked = [question for turns in workload.conversations for question in turns]
    by_kind: dict[str, list[float]] = {}
    for question, answer in zip(asked, answers, strict=True):
        if answer.tokens:
            by_kind.setdefault(question.kind, []).append(1000 * answer.seconds)
    ttft = sorted(time for times in by_kind.values() for time in times)
    done = [answer for answer in answers if answer.tokens]
    pairs = [
        (first, answer)
        for first, answer in zip(expected or (), answers, strict=expected is not None)
        if first.tokens and answer.tokens
    ]
    found = [[*differences(*pair, tolerance)] for pair in pairs]
    errors = dict.fromkeys(f"{each.status}: {each.error}" for each in answers if each.error)
    return Figures(
        at_once=workload.at_once,
        asked=len(asked),
        failed=len(asked) - len(done),
        seconds=seconds,
        requests_per_s=len(done) / seconds,
        output_tokens_per_s=sum(len(answer.tokens) for answer in done) / seconds,
        prompt_tokens=_mean([answer.usage.get("prompt_tokens", 0) for answer in done]),
        ttft_ms={kind: statistics.median(times) for kind, times in by_kind.items()},
        ttft_p50_ms=_percentile(ttft, 50),
        ttft_p99_ms=_percentile(ttft, 99),
        items=_items(answers),
        distinct=len({tuple(answer.tokens) for answer in done}),
        compared=len(pairs),
        equal=found.count([]),
        others=others,
        farthest=max((_farthest(*pair) for pair in pairs), default=0.0),
        notes=[*errors, *(text for texts in found for text in texts)][:SHOWN],
    )


def _items(answers: Sequence[Answer]) -> Mapping[str, int]:
    """Return the sums of the header `x-epd-items`, such as `hit=1,encoded=0,local=0`."""
    counts: dict[str, int] = {}
    for answer in answers:
        for source, count in re.findall(r"(\w+)=(\d+)", answer.items):
            counts[source] = counts.get(source, 0) + int(count)
    return counts


def _farthest(expected: Answer, got: Answer) -> float:
    if expected.tokens != got.tokens:
        return 0.0
    pairs = zip(expected.logprobs, got.logprobs, strict=True)
    return max((abs(a - b) for a, b in pairs), default=0.0)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _percentile(ordered: Sequence[float], percent: int) -> float:
    return ordered[len(ordered) * percent // 100] if ordered else 0.0
