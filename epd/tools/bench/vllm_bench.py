"""Execution of the real `vllm bench serve`, and reading of its measurements."""

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

from epd.tools.bench.dataset import HUB_NAME, Dataset, seen_before
from epd.tools.bench.targets import BenchModel, BenchTarget

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
        request_throughput_rps: completed requests per second.
        output_throughput_tps: output tokens per second.
        completed: number of completed requests.
        failed: number of failed requests.
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


def command(
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


def run(words: Sequence[str], result: Path) -> Mapping[str, Any]:
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


def read(result: Mapping[str, Any], trace: Sequence[str], output_len: int) -> Figures:
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
