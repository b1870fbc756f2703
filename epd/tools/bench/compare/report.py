"""Results of a comparison as JSON and Markdown."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date, datetime
from math import isnan, nan
from typing import Any

import orjson

from epd.tools.bench.compare.figures import Figures
from epd.tools.bench.compare.verdict import Measured
from epd.tools.machine import machine, nvidia_devices, versions

UNKNOWN = "not measured"


@dataclass(slots=True)
class ArmResult:
    """What was measured of an arm; `error` says why there is no more."""

    flags: Sequence[str]
    ready_s: float | None = None
    error: str = ""
    workloads: dict[str, Figures] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Results:
    """Results so far.

    Attributes:
        command: empty: it is not known.
        started_at: with the time of day, or the day alone.
        end: what cut the run off; empty: it is complete.
        tolerance: largest difference of log-probabilities of answers that count as equal.
    """

    command: Sequence[str]
    started_at: date
    model: str
    scale: str
    tolerance: float
    facts: Mapping[str, Any]
    arms: dict[str, ArmResult] = field(default_factory=dict)
    verdict: Sequence[str] = ()
    end: str = "not all arms are measured"

    def measured(self) -> Measured:
        return {name: arm.workloads for name, arm in self.arms.items()}

    def has_failures(self) -> bool:
        arms = self.arms.values()
        return any(arm.error or any(each.failed for each in arm.workloads.values()) for arm in arms)

    def conditions(self) -> Iterator[tuple[str, str]]:
        """Yield names and values of what the results depend on, with code between backticks."""
        has = self.facts["machine"]
        gpus = "; ".join(self.facts["gpus"]) or "no GPU"
        versions = ", ".join(f"{name} {number}" for name, number in self.facts["versions"].items())
        yield "machine", f"{gpus}; {has['cores']} cores of {has['cpu']}; {has['system']}"
        yield "software", f"{versions}, Python {has['python']}"
        yield "model, scale", f"{self.model}, {self.scale}"
        at = self.started_at
        yield "time", f"{at:%Y-%m-%d %H:%M} UTC" if isinstance(at, datetime) else f"{at}"
        yield "command", f"`{shlex.join(self.command)}`" if self.command else "not recorded"
        for name, arm in self.arms.items():
            ready = "did not start" if arm.ready_s is None else f"ready after {arm.ready_s:.0f} s"
            flags = f"`epd up {shlex.join(arm.flags)}`: " if arm.flags else ""
            yield f"`{name}`", flags + ready

    def json(self) -> bytes:
        content = {"kind": "compare", **asdict(self)}
        return orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)

    def markdown(self) -> str:
        return "\n".join(_report(self)) + "\n"


def facts() -> Mapping[str, Any]:
    """Return the hardware and the versions that the results depend on."""
    gpus = [f"{gpu.name}, {gpu.memory_mib} MiB, {gpu.driver}" for gpu in nvidia_devices()]
    return {"machine": machine(), "gpus": gpus, "versions": versions()}


def _report(results: Results) -> Iterator[str]:
    yield "# Comparison with plain vLLM"
    yield ""
    if results.end:
        yield f"**Cut off: {results.end}. What was measured before is below.**"
        yield ""
    for sentence in results.verdict:
        yield f"- {sentence}"
    for name, arm in results.arms.items():
        if arm.error:
            yield f"- `{name}`: {arm.error.splitlines()[-1]}"
    yield ""
    yield from ["| | |", "| --- | --- |"]
    yield from (f"| {name} | {value} |" for name, value in results.conditions())
    workloads = dict.fromkeys(name for arm in results.arms.values() for name in arm.workloads)
    for workload in workloads:
        measured = {
            name: arm.workloads[workload]
            for name, arm in results.arms.items()
            if workload in arm.workloads
        }
        at_once = next(iter(measured.values())).at_once
        yield from ["", f"## {workload}" + (f", {at_once} at once" if at_once > 1 else ""), ""]
        yield from _at_once(measured) if at_once > 1 else _by_kind(measured)
    yield from ["", "## Answers", ""]
    yield from _answers(results)


def _by_kind(measured: Mapping[str, Figures]) -> Iterator[str]:
    """Yield a table of the median TTFT, a row per kind of request."""
    yield f"| median TTFT, ms | {' | '.join(measured)} |"
    yield f"| --- |{' --- |' * len(measured)}"
    for kind in dict.fromkeys(kind for each in measured.values() for kind in each.ttft_ms):
        cells = (_shown(each.ttft_ms.get(kind, nan), ".0f") for each in measured.values())
        yield f"| {kind} | {' | '.join(cells)} |"
    for name, figures in measured.items():
        if figures.items:
            yield f"\n`{name}`: {_items(figures)}."


def _at_once(measured: Mapping[str, Figures]) -> Iterator[str]:
    asked = next(iter(measured.values()))
    tokens = _shown(asked.prompt_tokens, ".0f")
    yield f"{asked.asked} requests; prompt tokens on average: {tokens}."
    yield ""
    yield "| arm | requests/s | output tokens/s | TTFT p50, ms | TTFT p99, ms | failed | items |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, each in measured.items():
        yield (
            f"| {name} | {each.requests_per_s:.2f} | {_shown(each.output_tokens_per_s, '.0f')} | "
            f"{each.ttft_p50_ms:.0f} | {each.ttft_p99_ms:.0f} | {each.failed} | {_items(each)} |"
        )


def _shown(number: float, form: str) -> str:
    return UNKNOWN if isnan(number) else format(number, form)


def _items(figures: Figures) -> str:
    """Return where encoder outputs came from; empty without a proxy."""
    if not figures.items:
        return ""
    encodes = figures.items.get("encoded", 0) + figures.items.get("local", 0)
    return f"{figures.items.get('hit', 0)} hits, {encodes} encodes"


def _answers(results: Results) -> Iterator[str]:
    first = next(iter(results.arms), "")
    tolerance = _shown(results.tolerance, "g")
    yield (
        f"Compared with `{first}`: equal are the same tokens, with log-probabilities within a "
        f"tolerance ({tolerance}). At once, the requests of a batch differ from run to run, which "
        "changes results in 16-bit types."
    )
    yield ""
    yield "| arm | workload | distinct | equal | compared | farthest log-probability | notes |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, arm in results.arms.items():
        for workload, each in arm.workloads.items():
            notes = "; ".join(dict.fromkeys(each.notes)).replace("|", "\\|").replace("\n", " ")
            if isnan(each.distinct) and not each.compared and not notes:
                continue
            counts = f"{_shown(each.distinct, 'd')} | {each.equal} | {each.compared}"
            yield f"| {name} | {workload} | {counts} | {_shown(each.farthest, '.4f')} | {notes} |"
