"""Runs of `vllm bench serve`: execution, measurements, and results as text and JSON."""

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from epd.tools.bench.dataset import Dataset
from epd.tools.bench.replays import ideal_hit_rate, seen_before
from epd.tools.bench.targets import BenchFailed, BenchModel, BenchTarget, Items
from epd.tools.machine import machine, versions


@dataclass(frozen=True, slots=True)
class Run:
    """Run of one data set against one target, with the fields of the result file.

    Attributes:
        ttft_ms: time to the first token, by `mean`, `p50` and `p99`.
        tpot_ms: time per token after the first one, likewise.
        ttft_new_ms: median time to the first token of conversations with a new picture; None
            without such conversations.
        ttft_seen_ms: the same for conversations with a repeated picture.
        output_throughput_tps: output tokens per second.
        cut: number of completed requests with fewer tokens than requested.
        errors: distinct errors of the failed requests.
        hit_rate: share of pictures that were not encoded again; None: unknown.
        ideal_hit_rate: hit rate of an initially empty cache of unlimited size.
        encodes_per_distinct_picture: average number of encodes, in all stages; None: unknown.
        notes: remarks that a reader of the results needs.
    """

    name: str
    url: str
    dataset: str
    prompts: int
    distinct_pictures: int
    ttft_ms: Mapping[str, float]
    tpot_ms: Mapping[str, float]
    ttft_new_ms: float | None
    ttft_seen_ms: float | None
    request_throughput_rps: float
    output_throughput_tps: float
    completed: int
    failed: int
    cut: int
    errors: Sequence[str]
    hit_rate: float | None
    ideal_hit_rate: float
    encodes_per_distinct_picture: float | None
    notes: Sequence[str]


def bench_command(
    target: BenchTarget,
    model: BenchModel,
    dataset: Dataset,
    load: Mapping[str, object],
    result: Path,
) -> list[str]:
    """Return the command line; requests are sent in the data set's order.

    `load` has flags of `vllm bench serve`; None: its default.
    """
    flags = {
        "--backend": "openai-chat",
        "--base-url": target.url,
        "--endpoint": "/v1/chat/completions",
        "--model": model.id,
        "--tokenizer": model.tokenizer,
        "--dataset-name": "custom_image",
        "--dataset-path": dataset.path,
        "--num-prompts": len(dataset.trace),
        **{flag: value for flag, value in load.items() if value is not None},
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
        *(
            "--disable-shuffle",
            "--no-oversample",
            "--ignore-eos",
            "--disable-tqdm",
        ),
        *("--save-result", "--save-detailed"),
    ]


def run_bench(words: Sequence[str], result: Path) -> Mapping[str, Any]:
    """Run a command line, and load its result file.

    Raises:
        BenchFailed: the command failed, or no request was completed.
    """
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, check=False)
    if done.returncode or not result.exists():
        raise BenchFailed(f"vllm bench serve ended with code {done.returncode}")
    loaded: dict[str, Any] = orjson.loads(result.read_bytes())
    if not loaded["completed"]:
        raise BenchFailed(f"no request was answered: {', '.join(_errors(loaded))}")
    return loaded


def run_of(  # noqa: PLR0913, PLR0917 - all that a run consists of
    target: BenchTarget,
    dataset: Dataset,
    result: Mapping[str, Any],
    output_len: int,
    before: Items | str,
    after: Items | str,
) -> Run:
    """Return a run from a result of `vllm bench serve --save-detailed` and the proxy's counts.

    Instead of a count, there is the reason why it is unknown.
    """
    requests = zip(result["ttfts"], seen_before(dataset.trace), result["output_lens"], strict=True)
    # A failed request has no tokens.
    answered = [(ttft * 1000, seen, tokens) for ttft, seen, tokens in requests if tokens]
    completed, failed = result["completed"], result["failed"]
    items, notes = _counted(before, after, completed, failed, ideal_hit_rate(dataset.trace))
    cut = sum(tokens < output_len for *_, tokens in answered)
    if cut:
        notes.append(f"{cut} responses have fewer tokens than requested")
    errors = _errors(result)
    distinct = len(set(dataset.trace))
    return Run(
        name=target.name,
        url=target.url,
        dataset=dataset.name,
        prompts=len(dataset.trace),
        distinct_pictures=distinct,
        ttft_ms=_latency(result, "ttft"),
        tpot_ms=_latency(result, "tpot"),
        ttft_new_ms=_median([ttft for ttft, seen, _ in answered if not seen]),
        ttft_seen_ms=_median([ttft for ttft, seen, _ in answered if seen]),
        request_throughput_rps=result["request_throughput"],
        output_throughput_tps=result["output_throughput"],
        completed=completed,
        failed=failed,
        cut=cut,
        errors=errors,
        hit_rate=None if items is None else items.hits / items.total,
        ideal_hit_rate=ideal_hit_rate(dataset.trace),
        encodes_per_distinct_picture=(
            None if items is None else (items.encodes + items.local) / distinct
        ),
        notes=[*notes, *errors],
    )


def _counted(
    before: Items | str, after: Items | str, completed: int, failed: int, ideal: float
) -> tuple[Items | None, list[str]]:
    """Return the proxy's counts for a run, None if they are unknown, and remarks about them."""
    if isinstance(before, str) or isinstance(after, str):
        reason = after if isinstance(after, str) else before
        return None, [f"without hit rate and encodes: {reason}"]
    items, sent = after.counts_since(before), completed + failed
    if not completed <= items.total <= sent:
        reason = "it has other clients, or several workers with metrics a second late"
        counted = f"the proxy counted {items.total} pictures, {sent} were sent: {reason}"
        return None, [f"without hit rate and encodes: {counted}"]
    if items.hits / items.total > ideal:
        return items, ["pictures were in the cache before: use another --seed for new ones"]
    return items, []


def _errors(result: Mapping[str, Any]) -> list[str]:
    """Return the distinct errors, without their tracebacks."""
    ends = (error.strip().splitlines()[-1] for error in result["errors"] if error.strip())
    return [*dict.fromkeys(ends)]


def _latency(result: Mapping[str, Any], name: str) -> Mapping[str, float]:
    names = {"mean": "mean", "p50": "median", "p99": "p99"}
    return {key: result[f"{figure}_{name}_ms"] for key, figure in names.items()}


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def result_document(runs: Sequence[Run], started_at: datetime, arguments: Sequence[str]) -> bytes:
    """Return the content of the result file."""
    content = {
        "kind": "serve",
        "versions": versions(),
        "machine": machine(),
        "started_at": started_at.isoformat(timespec="seconds"),
        "command": ["epd", *arguments],
        "runs": [asdict(run) for run in runs],
    }
    return orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def summary(run: Run) -> Iterator[str]:
    """Yield lines with the figures that vLLM's own report lacks."""
    yield f"{run.name}, {run.dataset}: {run.distinct_pictures} pictures in {run.prompts} requests"
    if run.ttft_new_ms is not None and run.ttft_seen_ms is not None:
        yield (
            f"  median TTFT: {run.ttft_new_ms:.0f} ms with new pictures, {run.ttft_seen_ms:.0f} ms "
            "with pictures that were seen before"
        )
    if run.hit_rate is not None:
        yield (
            f"  hit rate: {run.hit_rate:.3f} (ideal: {run.ideal_hit_rate:.3f}), encodes per "
            f"picture: {run.encodes_per_distinct_picture:.3f}"
        )
    yield from (f"  {note}" for note in run.notes)
