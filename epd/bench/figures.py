"""Measurements of `epd bench overhead`: samples, medians, ratios and tables. Pure."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import nan
from typing import Any

from epd.bench.load import Load
from epd.bench.scenarios import Scenario

DIRECT = "direct"
"""Name of the load without a proxy."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Measurements of one turn of a contender, or the medians of its turns.

    Attributes:
        cpu_ms: CPU time of its processes per request, in milliseconds.
        cpu_chunk_us: CPU time per event of a stream, in microseconds; 0 without streams.
        rps: requests per second.
        first_p50_ms: median time to the first byte of a response's body, in milliseconds.
        first_p99_ms: 99th percentile of the same time.
        gap_ms: longest time between two arrivals of one response, in milliseconds.
        resident_bytes: peak memory so far, in bytes.
        done: number of complete responses.
        failed: number of other requests.
    """

    cpu_ms: float
    cpu_chunk_us: float
    rps: float
    first_p50_ms: float
    first_p99_ms: float
    gap_ms: float
    resident_bytes: float
    done: float
    failed: float


def sample(load: Load, cpu_s: float, resident_bytes: int) -> Sample:
    """Return the measurements of one turn."""
    first = sorted(one.first_s for one in load.done) or [0.0]
    events = sum(one.events for one in load.done)
    return Sample(
        cpu_ms=cpu_s * 1e3 / max(1, len(load.done)),
        cpu_chunk_us=cpu_s * 1e6 / events if events else 0.0,
        rps=len(load.done) / load.seconds,
        first_p50_ms=statistics.median(first) * 1e3,
        first_p99_ms=first[int(0.99 * (len(first) - 1))] * 1e3,
        gap_ms=max((one.gap_s for one in load.done), default=0.0) * 1e3,
        resident_bytes=resident_bytes,
        done=len(load.done),
        failed=len(load.failed),
    )


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a scenario.

    Attributes:
        scenario: scenario that was measured.
        turns: turns of each contender, in order; the contenders alternate. `DIRECT` is one of them.
    """

    scenario: Scenario
    turns: Mapping[str, Sequence[Sample]]

    def median(self, name: str) -> Sample:
        """Return the median of each measurement over the turns; `failed` is the sum."""
        columns = [asdict(turn) for turn in self.turns[name]]
        medians = {field: statistics.median(it[field] for it in columns) for field in columns[0]}
        return Sample(**{**medians, "failed": sum(it["failed"] for it in columns)})

    def ratio(self, one: str, other: str) -> float:
        """Return the ratio of one contender's CPU time to another's: the median over rounds.

        The result is NaN if the kernel has counted no CPU time for the other contender.
        """
        rounds = zip(self.turns[one], self.turns[other], strict=True)
        return statistics.median([a.cpu_ms / b.cpu_ms for a, b in rounds if b.cpu_ms] or [nan])

    def added_ms(self, name: str) -> tuple[float, float]:
        """Return the time added to the first byte, in ms: median and 99th percentile."""
        it, direct = self.median(name), self.median(DIRECT)
        return it.first_p50_ms - direct.first_p50_ms, it.first_p99_ms - direct.first_p99_ms

    def json(self, reference: str) -> dict[str, Any]:
        """Return the result as JSON, with the ratio of `reference` to each contender."""
        contenders = {}
        for name in self.turns:
            p50_ms, p99_ms = self.added_ms(name)
            contenders[name] = asdict(self.median(name))
            if name != DIRECT:
                ratio = round(self.ratio(reference, name), 4)
                added = {"added_p50_ms": p50_ms, "added_p99_ms": p99_ms}
                contenders[name] |= {f"{reference}_ratio": ratio, **added}
        return {"scenario": asdict(self.scenario), "contenders": contenders}


def table(results: Sequence[Result], reference: str) -> Iterator[str]:
    """Yield the lines of a Markdown table: CPU milliseconds, and ratios to other contenders."""
    others = [name for name in results[0].turns if name not in {reference, DIRECT}]
    ratios = [f"/ {name}" for name in others]
    names = [reference, *others]
    yield _row("CPU ms per request", *names, *ratios)
    yield _row(*["---"] * (1 + len(names) + len(ratios)))
    for result in results:
        cpu = (f"{result.median(name).cpu_ms:.3f}" for name in names)
        ratio = (f"{result.ratio(reference, name):.2f}" for name in others)
        yield _row(result.scenario.title, *cpu, *ratio)


def details(results: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of a Markdown table with all other measurements."""
    yield _row(
        "scenario",
        "proxy",
        "requests/s",
        "CPU us per chunk",
        "first byte p50, ms",
        "p99, ms",
        "added p50, ms",
        "p99, ms",
        "longest gap, ms",
        "peak MB",
        "done",
        "failed",
    )
    yield _row(*["---"] * 12)
    for result in results:
        for name in result.turns:
            it, (p50_ms, p99_ms) = result.median(name), result.added_ms(name)
            yield _row(
                result.scenario.title,
                name,
                f"{it.rps:.0f}",
                f"{it.cpu_chunk_us:.1f}",
                f"{it.first_p50_ms:.2f}",
                f"{it.first_p99_ms:.2f}",
                f"{p50_ms:.2f}",
                f"{p99_ms:.2f}",
                f"{it.gap_ms:.1f}",
                f"{it.resident_bytes / 1e6:.0f}",
                f"{it.done:.0f}",
                f"{it.failed:.0f}",
            )


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
