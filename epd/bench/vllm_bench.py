"""Runs the real `vllm bench serve`, and reads what it measured."""

import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson

from epd.bench.dataset import HUB_NAME, Dataset
from epd.bench.replays import seen_before
from epd.bench.targets import Model, Target

TAIL_LINES = 25
NEEDED = ("vllm", "datasets", "pandas")


class BenchFailed(Exception):
    """There is no result. The message says why."""


@dataclass(frozen=True, slots=True)
class Load:
    """How much is asked, and for how much.

    Attributes:
        request_rate: requests a second, on average, as a Poisson process; infinity: all at once.
        max_concurrency: how many may run at a time; None: any number.
        output_len: tokens of every answer.
    """

    request_rate: float
    max_concurrency: int | None
    output_len: int


@dataclass(frozen=True, slots=True)
class Latency:
    """A distribution, in milliseconds."""

    mean: float
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What `vllm bench serve` measured.

    Attributes:
        ttft_ms: time to the first token.
        tpot_ms: time for each token after it.
        ttft_new_ms: median of the answered conversations whose picture came for the first time.
        ttft_seen_ms: median of the others; either is None where there are none.
        request_throughput_rps: answered requests a second.
        output_throughput_tps: their tokens a second.
        completed: answered requests.
        failed: the others.
        cut: how many of the answered ones have fewer tokens than were asked for.
        errors: what became of those that failed, each once.
    """

    ttft_ms: Latency
    tpot_ms: Latency
    ttft_new_ms: float | None
    ttft_seen_ms: float | None
    request_throughput_rps: float
    output_throughput_tps: float
    completed: int
    failed: int
    cut: int
    errors: tuple[str, ...]


def missing() -> list[str]:
    """The packages that it needs and that are not installed."""
    return [name for name in NEEDED if find_spec(name) is None]


def command(target: Target, model: Model, dataset: Dataset, load: Load, result: Path) -> list[str]:
    """Its command line; requests leave in the data set's order."""
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
        # Its test request would be about the first picture, which would be no new one then.
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


def run(words: Sequence[str], result: Path) -> Mapping[str, Any]:
    """Run that command line, and load the result file it was told to write.

    Raises:
        BenchFailed: it failed, or no request was answered.
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


def read(result: Mapping[str, Any], trace: Sequence[str], output_len: int) -> Figures:
    """The figures in a result of `vllm bench serve --save-detailed`."""
    requests = zip(result["ttfts"], seen_before(trace), result["output_lens"], strict=True)
    # Of a request that failed it has neither a first token nor any other.
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
    """Each once, without what led there."""
    ends = (error.strip().splitlines()[-1] for error in result["errors"] if error.strip())
    return tuple(dict.fromkeys(ends))


def _latency(result: Mapping[str, Any], name: str) -> Latency:
    return Latency(*(result[f"{figure}_{name}_ms"] for figure in ("mean", "median", "p99")))


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
