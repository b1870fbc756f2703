"""Command `epd bench serve`: a fleet measured by vLLM's own benchmark and the proxy's metrics."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from epd.parser import Commands
from epd.tools.bench import dataset, targets
from epd.tools.bench.dataset import (
    LOCAL,
    REPLAYS,
    VISION_ARENA,
    Dataset,
    DatasetUnavailable,
    local,
    rng,
    vision_arena,
)
from epd.tools.bench.runs import (
    BenchFailed,
    Run,
    VllmBenchLoad,
    bench_command,
    missing_packages,
    read_figures,
    result_document,
    result_tables,
    run_bench,
    run_of,
)
from epd.tools.bench.targets import BenchModel, BenchTarget, Items, NoFigures, TargetFailed
from epd.tools.up.signals import leave_contexts_on_signals

AUTO, ALL = "auto", "all"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """Plan of a benchmark; its fields are the command's flags."""

    url: Sequence[BenchTarget]
    model: str | None
    tokenizer: str | None
    dataset: str
    num_prompts: int
    request_rate: float
    max_concurrency: int | None
    output_len: int
    warmups: int
    seed: int
    data_dir: Path
    out: Path | None

    @property
    def load(self) -> VllmBenchLoad:
        return VllmBenchLoad(self.request_rate, self.max_concurrency, self.output_len)


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
    _add_target_flags(parser.add_argument_group("targets"))
    _add_load_flags(parser.add_argument_group("load"))
    parser.add_argument("--out", type=Path, metavar="FILE", help="file for the results, as JSON")
    parser.set_defaults(run=_run)


def _add_target_flags(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--url",
        type=_checked(BenchTarget.parse),
        action="append",
        required=True,
        metavar="[NAME=]URL",
        help="URL of a proxy, or of another OpenAI server to compare it with; repeatable",
    )
    add(
        "--model",
        help="served name of the model (default: the only one)",
    )
    add("--tokenizer", help="folder or hub name of the tokenizer (default: the server's model)")


def _add_load_flags(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--dataset",
        default=AUTO,
        choices=(AUTO, VISION_ARENA, *REPLAYS, ALL),
        help="visionarena: VisionArena-Chat; local: a similar one, generated here; pool: 200 "
        "pictures at 80%% reuse; window: 4 of 5 pictures were among the last 50; auto (default): "
        "visionarena if its hub can be reached, else local; all: auto, pool and window",
    )
    number = partial(add, type=_checked(_count), metavar="N")
    number("--num-prompts", default=100, help="requests per run (default: 100)")
    number("--max-concurrency", help="maximum of concurrent requests (default: no limit)")
    number("--output-len", default=128, help="tokens per response (default: 128)")
    add(
        "--request-rate",
        type=_checked(_rate),
        default=float("inf"),
        metavar="R",
        help="requests per second, on average (default: inf, all at once)",
    )
    integer = partial(add, type=int, metavar="N")
    integer(
        "--warmups",
        default=3,
        help="requests with other pictures before the measurement (default: 3)",
    )
    integer("--seed", default=0, help="seed of pictures and questions (default: 0)")
    add(
        "--data-dir",
        type=Path,
        default=_cache_dir(),
        metavar="FOLDER",
        help="folder for generated pictures (default: %(default)s)",
    )


def _run(**flags: Any) -> None:
    plan = BenchPlan(**flags)
    if missing := missing_packages():
        sys.exit(f"epd bench serve: needs {', '.join(missing)}: pip install '.[vllm,bench]'")
    leave_contexts_on_signals()
    try:
        runs = _measure(plan)
    except (BenchFailed, DatasetUnavailable, TargetFailed, OSError) as error:
        sys.exit(f"epd bench serve: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped")
    print("\n".join(result_tables(runs)))


def _measure(plan: BenchPlan) -> list[Run]:
    """Return all runs, one target after the other; each run is written before the next begins."""
    started_at = datetime.now(UTC)
    datasets = list(_datasets(plan))
    runs: list[Run] = []
    _write(plan, runs, started_at)  # fail before the measurement if the file is not writable
    for target in plan.url:
        model = targets.find_model(target, plan.model)
        if plan.tokenizer:
            model = replace(model, tokenizer=plan.tokenizer)
        for number in range(plan.warmups):
            targets.warm_target(target, model, dataset.jpeg(rng(plan.seed, "warm-up", number)))
        for chosen in datasets:
            runs.append(_one(plan, target, model, chosen))
            _write(plan, runs, started_at)
    return runs


def _write(plan: BenchPlan, runs: Sequence[Run], started_at: datetime) -> None:
    if plan.out is not None:
        plan.out.write_bytes(result_document(runs, started_at, sys.argv[1:]))


def _one(plan: BenchPlan, target: BenchTarget, model: BenchModel, dataset: Dataset) -> Run:
    _report(f"{target.name}: {len(dataset.trace)} requests of {dataset.name}")
    before = _items(target)
    with TemporaryDirectory(prefix="epd-bench-") as folder:
        file = Path(folder) / "result.json"
        words = bench_command(target, model, dataset, plan.load, file)
        result = run_bench(words, file)
    figures = read_figures(result, dataset.trace, plan.output_len)
    return run_of(target, dataset, figures, (before, _items(target)))


def _items(target: BenchTarget) -> Items | str:
    """Return the proxy's counts, or the reason why they are unknown."""
    try:
        return targets.read_items(target)
    except NoFigures as reason:
        return str(reason)


def _datasets(plan: BenchPlan) -> Iterator[Dataset]:
    names = [AUTO, *(data_set for data_set in REPLAYS if data_set != LOCAL)]
    for name in names if plan.dataset == ALL else [plan.dataset]:
        if name in {AUTO, VISION_ARENA}:
            try:
                yield vision_arena(plan.num_prompts)
                continue
            except DatasetUnavailable as reason:
                if name == VISION_ARENA:
                    raise
                _report(f"{reason}; using the local data set")
        replay = LOCAL if name == AUTO else name
        _report(f"pictures of {replay} are in {plan.data_dir}")
        yield local(plan.data_dir, replay, plan.num_prompts, plan.seed)


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _checked(read: Callable[[str], _T]) -> Callable[[str], _T]:
    """Return a flag's type that shows the message of a `ValueError` to the user."""

    def convert(text: str) -> _T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{text!r} is not a number above 0")
    return int(text)


def _rate(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError(f"{text!r} is not a rate above 0")
    return value


def _cache_dir() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "epd" / "bench"
