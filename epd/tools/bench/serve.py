"""Command `epd bench serve`: a fleet measured by vLLM's own benchmark and the proxy's metrics."""

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from epd.parser import Commands
from epd.tools.bench import targets
from epd.tools.bench.dataset import write_dataset
from epd.tools.bench.pictures import jpeg, rng
from epd.tools.bench.replays import REPLAYS
from epd.tools.bench.runs import (
    Run,
    bench_command,
    result_document,
    run_bench,
    run_of,
    summary,
)
from epd.tools.bench.targets import BenchFailed, BenchTarget
from epd.tools.up.signals import leave_contexts_on_signals

ALL = "all"


def add_parser(benchmarks: Commands) -> None:
    """Add `serve` to the benchmarks."""
    parser = benchmarks.add_parser(
        "serve",
        help="measure a fleet with `vllm bench serve`",
        description="Run `vllm bench serve` on a fleet, and report how often it encoded pictures "
        "that it had encoded before. OPENAI_API_KEY is sent with the requests; EPD_ADMIN_API_KEY "
        "opens the proxy's /metrics.",
        epilog="example: epd bench serve --url epd=http://localhost:8000 "
        "--url plain=http://localhost:9000 --dataset all --out results.json",
        usage="epd bench serve --url [NAME=]URL [FLAG ...]",
    )
    _add_flags(parser.add_argument)
    parser.set_defaults(run=_run)


def _add_flags(add: Callable[..., Any]) -> None:
    add(
        "--url",
        type=BenchTarget.parse,
        action="append",
        required=True,
        metavar="[NAME=]URL",
        help="URL of a proxy, or of another OpenAI server to compare it with; repeatable",
    )
    add("--model", help="served name of the model (default: the only one)")
    add("--tokenizer", help="folder or hub name of the tokenizer (default: the server's model)")
    add(
        "--dataset",
        dest="replay",
        default="local",
        choices=(*REPLAYS, ALL),
        help="local (default): pictures repeat as in VisionArena-Chat; pool: 200 pictures at 80%% "
        "reuse; window: 4 of 5 pictures were among the last 50; all: each of these",
    )
    number = partial(add, type=int, metavar="N")
    number("--num-prompts", default=100, help="requests per run (default: 100)")
    number("--max-concurrency", help="maximum of concurrent requests (default: no limit)")
    number("--output-len", default=128, help="tokens per response (default: 128)")
    number("--seed", default=0, help="seed of pictures and questions (default: 0)")
    number(
        "--warmups",
        default=3,
        help="requests with other pictures before the measurement (default: 3)",
    )
    add(
        "--request-rate",
        type=float,
        default=float("inf"),
        metavar="R",
        help="requests per second, on average (default: inf, all at once)",
    )
    add("--out", type=Path, metavar="FILE", help="file for the results, as JSON")


def _run(**flags: Any) -> None:
    if find_spec("vllm") is None:
        sys.exit("epd bench serve: needs vllm: pip install 'epd-proxy[vllm]'")
    leave_contexts_on_signals()
    try:
        _measure(**flags)
    except (BenchFailed, OSError) as error:
        sys.exit(f"epd bench serve: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped")


def _measure(  # noqa: PLR0913 - the command's flags
    *,
    url: list[BenchTarget],
    model: str | None,
    tokenizer: str | None,
    replay: str,
    num_prompts: int,
    request_rate: float,
    max_concurrency: int | None,
    output_len: int,
    warmups: int,
    seed: int,
    out: Path | None,
) -> None:
    """Run one target after the other; each result is written before the next run begins."""
    if num_prompts < 1:
        raise BenchFailed("--num-prompts must be at least 1")
    started_at = datetime.now(UTC)
    load = {
        "--request-rate": request_rate,
        "--max-concurrency": max_concurrency,
        "--custom-output-len": output_len,
    }
    names = REPLAYS if replay == ALL else [replay]
    runs: list[Run] = []

    def write() -> None:
        if out is not None:
            out.write_bytes(result_document(runs, started_at, sys.argv[1:]))

    write()  # fail before the measurement if the file is not writable
    models = [targets.find_model(target, model) for target in url]
    if tokenizer:
        models = [found._replace(tokenizer=tokenizer) for found in models]
    with TemporaryDirectory(prefix="epd-bench-") as folder:
        datasets = [write_dataset(Path(folder), name, num_prompts, seed) for name in names]
        for target, served in zip(url, models, strict=True):
            for number in range(warmups):
                targets.warm_target(target, served, jpeg(rng(seed, "warm-up", number)))
            for chosen in datasets:
                _report(f"{target.name}: {num_prompts} requests of {chosen.name}")
                before = targets.read_items(target)
                file = Path(folder) / "result.json"
                file.unlink(missing_ok=True)
                result = run_bench(bench_command(target, served, chosen, load, file), file)
                after = targets.read_items(target)
                runs.append(run_of(target, chosen, result, output_len, before, after))
                print("\n".join(summary(runs[-1])), flush=True)
                write()


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
