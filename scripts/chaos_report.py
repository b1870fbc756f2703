"""What a run of `chaos.py` has shown, and what it must not have."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import orjson

from scripts.chaos_faults import Fault, had_another
from scripts.chaos_load import Outcome

MORE_FDS = 16
"""Connections to the store that a proxy may have kept."""

SLOPE_FROM_S = 300.0
"""Before, memory grows into what a load needs, and a slope says nothing."""

MAX_SLOPE = 1.0
EXAMPLES = 10

Excuse = Callable[[Outcome, Iterable[Fault]], bool]


@dataclass(frozen=True)
class Left:
    """What is left when all is over.

    Attributes:
        recovered: whether every request is answered again.
        idle: instances that are not asked any more.
        open: requests that instances still work on.
        kept: prompts that prefill instances keep for a decode that has not come.
        fds: descriptors that the proxy had at the start, and has.
    """

    recovered: bool
    idle: Sequence[str]
    open: int
    kept: int
    fds: tuple[int, int]


@dataclass(frozen=True)
class Figures:
    """A run in figures."""

    seconds: float
    requests: int
    questions: Mapping[str, int]
    outcomes: Mapping[str, int]
    faults: Mapping[str, int]
    wrong: int
    lost: int
    misshapen: int
    not_excused: int
    had_another: int
    rss_mb: tuple[float, float]
    rss_mb_per_min: float
    left: Left
    examples: Sequence[str]

    @property
    def broken(self) -> list[str]:
        """The invariants that did not hold."""
        checks = {
            "wrong answers": self.wrong == 0,
            "requests lost": self.lost == 0,
            "answers in no shape": self.misshapen == 0,
            "errors not excused": self.not_excused == 0,
            "memory grows": self.seconds < SLOPE_FROM_S or self.rss_mb_per_min < MAX_SLOPE,
            "descriptors left": self.left.fds[1] <= self.left.fds[0] + MORE_FDS,
            "requests left upstream": self.left.open == 0,
            "does not serve again": self.left.recovered,
            "instances not asked again": not self.left.idle,
        }
        return [name for name, holds in checks.items() if not holds]

    def to_json(self) -> bytes:
        """All of it."""
        return orjson.dumps(asdict(self) | {"broken": self.broken}, option=orjson.OPT_INDENT_2)

    def __str__(self) -> str:
        rows = {
            "requests": self.requests,
            "of them": _counts(self.questions),
            "ended": _counts(self.outcomes),
            "faults": f"{sum(self.faults.values())}: {_counts(self.faults)}",
            "wrong answers": self.wrong,
            "lost requests": self.lost,
            "answers not in OpenAI's shape": self.misshapen,
            "errors that no fault excuses": self.not_excused,
            "errors though each role had a sound instance": self.had_another,
            "memory of the proxy, start and end": "{:.0f} MB, {:.0f} MB".format(*self.rss_mb),
            "its growth": f"{self.rss_mb_per_min:+.2f} MB/min",
            "its descriptors, start and end": "{}, {}".format(*self.left.fds),
            "open upstream at the end": self.left.open,
            "KV caches left to their lease": self.left.kept,
            "serves again": "yes" if self.left.recovered else "no",
            "instances not asked again": ", ".join(self.left.idle) or "none",
            "invariants broken": ", ".join(self.broken) or "none",
        }
        table = [f"| {name} | {value} |" for name, value in rows.items()]
        return "\n".join(["| figure | value |", "| --- | --- |", *table, *self.examples])


def figures(
    outcomes: Sequence[Outcome],
    faults: Sequence[Fault],
    excuse: Excuse,
    memory: Sequence[tuple[float, float]],
    left: Left,
) -> Figures:
    """The figures of a run.

    Args:
        outcomes: how its requests ended.
        faults: what was broken.
        excuse: which errors may be.
        memory: seconds, and megabytes that the proxy had then.
        left: what is left.
    """
    results = Counter(outcome.result for outcome in outcomes)
    errors = [one for one in outcomes if one.result in {"error", "broken off"}]
    felt = {one: [fault for fault in faults if fault.felt(one)] for one in errors}
    inexcusable = [one for one in errors if not excuse(one, felt[one])]
    needless = [one for one in errors if had_another(one, felt[one])]
    bad = [one for one in outcomes if one.result in {"wrong", "lost", "misshapen"}]
    return Figures(
        seconds=round(memory[-1][0] - memory[0][0], 1),
        requests=len(outcomes),
        questions=dict(Counter(outcome.name for outcome in outcomes)),
        outcomes=dict(Counter(outcome.kind for outcome in outcomes)),
        faults=dict(Counter(f"{fault.role} {fault.kind}" for fault in faults)),
        wrong=results["wrong"],
        lost=results["lost"],
        misshapen=results["misshapen"],
        not_excused=len(inexcusable),
        had_another=len(needless),
        rss_mb=(memory[0][1], memory[-1][1]),
        rss_mb_per_min=_slope(memory),
        left=left,
        examples=[
            f"{label}: {_example(one, faults)}"
            for label, several in (
                ("bad", bad),
                ("not excused", inexcusable),
                ("needless", needless),
            )
            for one in several[:EXAMPLES]
        ],
    )


def _slope(memory: Sequence[tuple[float, float]]) -> float:
    """Megabytes a minute, by least squares over the last three quarters."""
    later = memory[len(memory) // 4 :]
    if len({at for at, _ in later}) < 2:  # noqa: PLR2004 - a line has two points
        return 0.0
    return round(statistics.linear_regression(*zip(*later, strict=True)).slope * 60, 3)


def _counts(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {count}" for name, count in ordered)


def _example(outcome: Outcome, faults: Sequence[Fault]) -> str:
    """What to look for in the logs."""
    felt = [
        f"{fault.name} {fault.kind} {fault.began_s - outcome.began_s:+.2f}"
        f" to {fault.ended_s - outcome.began_s:+.2f}"
        for fault in faults
        if fault.felt(outcome)
    ]
    took_s = outcome.ended_s - outcome.began_s
    stream = " stream" if outcome.stream else ""
    return (
        f"{outcome.kind}: {outcome.name}{stream}, {took_s:.2f} s, "
        f"{outcome.request_id}, {outcome.detail!r}; felt: {'; '.join(felt) or 'nothing'}"
    )
