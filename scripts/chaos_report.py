"""Report of a run of `chaos.py`, and the invariants that it checks."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import orjson

from scripts.chaos_faults import Fault, cut_by, excused
from scripts.chaos_load import Outcome
from scripts.chaos_proxy import Cut

MORE_FDS = 16
"""Descriptors that a process of the proxy may keep for connections to the store."""

SLOPE_FROM_S = 300.0
"""Shortest run with a check of growing memory, in seconds: before, memory grows with the load."""

MAX_SLOPE = 1.0
EXAMPLES = 10

Sample = tuple[float, Mapping[tuple[str, int], float]]
"""Time in seconds, and the memory of each process of the proxy in MB, by name and pid."""


@dataclass(frozen=True)
class Left:
    """Resources in use at the end of a run.

    Attributes:
        recovered: whether every request is answered again.
        idle: instances and workers that get no more requests.
        open: requests that instances still process.
        under_way: gauges of the proxy's processes that are not 0, and instances that they skip.
        claims: entries that a proxy still claims in the store.
        kept: prompts that prefill instances keep for a missing decode.
        kept_later: the same number after a few requests without faults.
        fds: descriptors of each process of the proxy, at the start and now.
        processes: workers that outlived the process that started them.
        surprises: log lines that no fault explains.
    """

    recovered: bool
    idle: Sequence[str]
    open: int
    under_way: Sequence[str]
    claims: int
    kept: int
    kept_later: int
    fds: Mapping[str, tuple[int, int]]
    processes: Sequence[str] = ()
    surprises: Sequence[str] = ()


@dataclass(frozen=True)
class Memory:
    """Resident memory of a process over its life, in megabytes."""

    seconds: float
    first: float
    last: float
    per_min: float

    @classmethod
    def over(cls, samples: Sequence[tuple[float, float]]) -> "Memory":
        (began_s, first), (ended_s, last) = samples[0], samples[-1]
        return cls(round(ended_s - began_s, 1), first, last, _slope(samples))

    @property
    def grows(self) -> bool:
        return self.seconds >= SLOPE_FROM_S and self.per_min >= MAX_SLOPE


@dataclass(frozen=True)
class Figures:
    """Counts, memory and leaks of a run."""

    seconds: float
    requests: int
    questions: Mapping[str, int]
    outcomes: Mapping[str, int]
    faults: Mapping[str, int]
    cut_off: int
    wrong: int
    lost: int
    misshapen: int
    not_excused: int
    memory: Mapping[str, Memory]
    left: Left
    examples: Sequence[str]

    @property
    def broken(self) -> list[str]:
        """Return the names of the invariants that did not hold."""
        checks = {
            "wrong answers": self.wrong == 0,
            "requests lost": self.lost == 0,
            "answers in no shape": self.misshapen == 0,
            "errors not excused": self.not_excused == 0,
            "memory grows": not any(memory.grows for memory in self.memory.values()),
            "descriptors left": all(
                last <= first + MORE_FDS for first, last in self.left.fds.values()
            ),
            "requests left upstream": self.left.open == 0,
            "places or bytes left": not self.left.under_way,
            "claims left": self.left.claims == 0,
            "KV caches left by good requests": self.left.kept_later <= self.left.kept,
            "processes left": not self.left.processes,
            "surprises in the log": not self.left.surprises,
            "does not serve again": self.left.recovered,
            "instances or workers not asked again": not self.left.idle,
        }
        return [name for name, holds in checks.items() if not holds]

    def to_json(self) -> bytes:
        return orjson.dumps(asdict(self) | {"broken": self.broken}, option=orjson.OPT_INDENT_2)


def figures(
    outcomes: Sequence[Outcome],
    faults: Sequence[Fault],
    cuts: Sequence[Cut],
    memory: Sequence[Sample],
    left: Left,
) -> Figures:
    """Return the report of a run, from its observations; `memory` is in the order of time."""
    results = Counter(outcome.result for outcome in outcomes)
    errors = [outcome for outcome in outcomes if outcome.result in {"error", "broken off"}]
    felt = {error: [fault for fault in faults if fault.felt(error)] for error in errors}
    inexcusable = [error for error in errors if not excused(error, felt[error])]
    cut = {id(outcome) for outcome in outcomes if cut_by(outcome, cuts)}
    lost = [
        outcome
        for outcome in outcomes
        if outcome.result in {"lost", "cut off"} and id(outcome) not in cut
    ]
    bad = [*lost, *(outcome for outcome in outcomes if outcome.result in {"wrong", "misshapen"})]
    return Figures(
        seconds=round(memory[-1][0] - memory[0][0], 1),
        requests=len(outcomes),
        questions=dict(Counter(outcome.name for outcome in outcomes)),
        outcomes=dict(Counter(outcome.kind for outcome in outcomes)),
        faults=dict(Counter(f"{fault.role} {fault.kind}" for fault in faults)),
        cut_off=len(cut),
        wrong=results["wrong"],
        lost=len(lost),
        misshapen=results["misshapen"],
        not_excused=len(inexcusable),
        memory=_by_process(memory),
        left=left,
        examples=[
            f"{label}: {_example(outcome, faults)}"
            for label, several in (("bad", bad), ("not excused", inexcusable))
            for outcome in several[:EXAMPLES]
        ],
    )


def _by_process(samples: Sequence[Sample]) -> dict[str, Memory]:
    """Return the memory of each process; for a killed worker, that of its latest replacement."""
    lives: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for at_s, megabytes in samples:
        for process, mb in megabytes.items():
            lives.setdefault(process, []).append((at_s, mb))
    return {name: Memory.over(life) for (name, _), life in lives.items()}


def _slope(memory: Sequence[tuple[float, float]]) -> float:
    """Return the growth in MB per minute, by least squares over the last three quarters."""
    later = memory[len(memory) // 4 :]
    if len({at for at, _ in later}) < 2:  # noqa: PLR2004 - a line has two points
        return 0.0
    return round(statistics.linear_regression(*zip(*later, strict=True)).slope * 60, 3)


def _example(outcome: Outcome, faults: Sequence[Fault]) -> str:
    """Return one line about a failed request, to find it in the logs."""
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
