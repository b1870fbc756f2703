"""Command `epd bench compare`: its flags, and its arms one after the other."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any

from epd.parser import Commands
from epd.tools.bench.answer import TOLERANCES, Answer
from epd.tools.bench.compare.arms import (
    ARMS,
    EXAMPLE,
    gpus_of,
    has_store,
    running,
)
from epd.tools.bench.compare.figures import figures_of
from epd.tools.bench.compare.load import run_workload, warm_up
from epd.tools.bench.compare.page import page
from epd.tools.bench.compare.processors import CpuTime
from epd.tools.bench.compare.report import ArmResult, Results, facts
from epd.tools.bench.compare.traces import TraceInvalid, read_trace, trace_lines
from epd.tools.bench.compare.verdict import PLAIN, Measured, verdict
from epd.tools.bench.compare.workloads import (
    SCALES,
    WORKLOADS,
    Question,
    Scale,
    Workload,
    warm_ups,
)
from epd.tools.models import add_generate, model_folder, write_model
from epd.tools.up.platforms import runs_on_cpu
from epd.tools.up.process import ProcessDied
from epd.tools.up.signals import leave_contexts_on_signals
from epd.tools.up.vllm_flags import flag_value
from epd.tools.vllm_cpu.consent import FLAG, adapt_vllm

DESCRIPTION = """\
Start plain vLLM and fleets of this project on this machine, one after the other, send each the same
requests, and say what to run, by how much, and where it loses. FOLDER/results.json,
report.md and report.html, a page with plots, are written after each workload: a run that is cut off
keeps what it measured.
"""
EPILOG = (
    "example: epd bench compare --model M --gpus e=0,pd=0 -- --vllm-flags='--max-model-len 32768'; "
    "without a hub: epd bench compare --generate tiny --scale small -- --device cpu"
)


def add_parser(benchmarks: Commands) -> None:
    """Add `compare` to the benchmarks."""
    parser = benchmarks.add_parser(
        "compare",
        help="compare plain vLLM with fleets of this project",
        description=DESCRIPTION,
        epilog=EPILOG,
        usage="epd bench compare --model MODEL [FLAG ...] [-- FLAG_OF_UP ...]",
    )
    parser.add_argument("--model", help="model: name on the hub, or folder")
    add_generate(parser)
    _add_flags(parser.add_argument)
    parser.set_defaults(run=_run)


def _add_flags(add: Callable[..., Any]) -> None:
    add(
        "--arms",
        nargs="+",
        choices=ARMS,
        default=[PLAIN, "cache", "epd"],
        help="plain: vLLM alone; cache: one engine with the store; epd: E+PD; e+p+d; example: E+PD "
        "with vLLM's example proxy and connector (default: plain cache epd). Answers are compared "
        "with those of the first",
    )
    add(
        "--workloads",
        nargs="+",
        choices=WORKLOADS,
        default=[],
        help="single: one request at a time; the others: several at once (default: all, without "
        "--traces)",
    )
    add(
        "--traces",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="further workloads: requests in AIPerf's JSONL (mooncake_trace with messages or "
        "text_input, or single_turn), sent by as many clients as the scale has",
    )
    add(
        "--write-traces",
        type=Path,
        metavar="FOLDER",
        help="write the workloads as AIPerf's JSONL (mooncake_trace) and measure nothing",
    )
    add("--scale", choices=SCALES, default="medium", help="size of the workloads (default: medium)")
    add("--gpus", metavar="DEVICES", help="as of `epd up`; each arm takes those of its stages")
    add(
        "--example",
        type=Path,
        metavar="FILE",
        help="disagg_epd_proxy.py of vLLM's source, for the arm example",
    )
    add(
        "--out",
        type=Path,
        default=Path("compare"),
        metavar="FOLDER",
        help="folder for the report and the logs (default: compare)",
    )
    add(
        "--time-limit",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="stop all servers after this time, and keep what was measured (default: 0, no limit)",
    )
    add(
        "--tolerance",
        type=float,
        default=TOLERANCES["bfloat16"],
        metavar="X",
        help="largest difference of log-probabilities of equal answers (default: %(default)s)",
    )
    add("up", nargs="*", metavar="FLAG_OF_UP", help="flags of `epd up` for all arms, after --")


def _run(  # noqa: PLR0913 - the command's flags
    *,
    model: str | None,
    generate: str | None,
    arms: Sequence[str],
    workloads: Sequence[str],
    traces: Sequence[Path],
    write_traces: Path | None,
    scale: str,
    gpus: str | None,
    example: Path | None,
    out: Path,
    time_limit: float,
    tolerance: float,
    up: Sequence[str],
) -> None:
    chosen = _workloads_or_exit(workloads, traces, SCALES[scale])
    if write_traces is not None:
        _write_traces(chosen, write_traces)
        return
    _check_flags(arms, model or generate, example, time_limit)
    flags = {arm: [*_gpus_or_exit(arm, gpus), *up] for arm in ARMS if arm in arms}
    leave_contexts_on_signals()
    # The alarm is an interrupt: every context then stops its servers.
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    folder = Path(model) if model else model_folder(generate or "")
    results = Results(
        command=["epd", *sys.argv[1:]],
        started_at=datetime.now(UTC),
        model=generate or model or "",
        scale=scale,
        tolerance=tolerance,
        facts=facts(),
    )
    signal.setitimer(signal.ITIMER_REAL, time_limit)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if runs_on_cpu(flag_value(up, "--device"), os.environ):
            adapt_vllm("epd bench compare", allowed=FLAG in up)
        if generate is not None:
            _say(f"model {generate}: {folder}")
            write_model(generate, folder)
        _compare(
            results,
            flags,
            str(folder) if generate else model or "",
            warm_ups(SCALES[scale]),
            chosen,
            example,
            out,
        )
        results.end = ""
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"epd bench compare: {error}")
    except KeyboardInterrupt:
        results.end = "the time limit, or a signal"
    signal.setitimer(signal.ITIMER_REAL, 0)
    with suppress(KeyboardInterrupt):
        write_results(results, out)
    print(results.markdown())
    if results.end or results.has_failures():
        sys.exit(1)


def _check_flags(
    arms: Sequence[str],
    model: str | None,
    example: Path | None,
    time_limit: float,
) -> None:
    if model is None:
        sys.exit("epd bench compare: --model or --generate is required")
    if EXAMPLE in arms and (example is None or not example.is_file()):
        sys.exit("epd bench compare: --arms example needs --example FILE")
    if not 0 <= time_limit < inf:
        sys.exit(f"epd bench compare: --time-limit {time_limit} is not 0 or more seconds")


def _workloads_or_exit(
    names: Sequence[str], traces: Sequence[Path], scale: Scale
) -> Sequence[Workload]:
    """Return the named workloads, or all of them without traces, and those of the traces."""
    names = [*dict.fromkeys(names)] or ([] if traces else [*WORKLOADS])
    workloads = [workload for name in names for workload in WORKLOADS[name](scale)]
    for file in traces:
        try:
            with file.open("rb") as lines:
                workloads.append(read_trace(file.stem, lines, file.parent, scale.at_once))
        except (OSError, TraceInvalid) as error:
            sys.exit(f"epd bench compare: --traces {file}: {error}")
    return workloads


def _write_traces(workloads: Sequence[Workload], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for workload in workloads:
            path = folder / (re.sub(r"\W+", "-", workload.name) + ".jsonl")
            with path.open("wb") as file:
                file.writelines(trace_lines(workload))
            print(path)
    except OSError as error:
        sys.exit(f"epd bench compare: --write-traces {error}")


def _gpus_or_exit(arm: str, gpus: str | None) -> Sequence[str]:
    try:
        return () if gpus is None else gpus_of(arm, gpus)
    except ValueError as error:
        sys.exit(f"epd bench compare: --gpus {error}")


def _compare(  # noqa: PLR0913, PLR0917 - all that a comparison consists of
    results: Results,
    arms: Mapping[str, Sequence[str]],
    model: str,
    questions: Sequence[Question],
    workloads: Sequence[Workload],
    example: Path | None,
    out: Path,
) -> None:
    """Measure one arm after the other; one that does not start is left out."""
    _say(f"workloads: {', '.join(workload.name for workload in workloads)}")
    expected: dict[str, Sequence[Answer]] = {}
    for name, flags in arms.items():
        result = results.arms[name] = ArmResult(flags)
        started_s = time.monotonic()
        try:
            with running(name, model, flags, out / "logs", example, _say) as (url, processes):
                result.ready_s = time.monotonic() - started_s
                warned = asyncio.run(warm_up(url, questions, has_store=has_store(name)))
                if warned:
                    result.error = warned
                    _say(f"{name}: {warned}")
                    continue
                for workload in workloads:
                    _measure(results, name, url, workload, expected)
                    write_results(results, out)
                    for process in processes:
                        process.check_alive()
        except (ProcessDied, TimeoutError) as error:
            result.error = str(error)
            _say(str(error))
        finally:
            write_results(results, out)


def _measure(
    results: Results,
    arm: str,
    url: str,
    workload: Workload,
    expected: dict[str, Sequence[Answer]],
) -> None:
    """Measure a workload of an arm; the first arm's answers become the expected ones."""
    is_first = arm == next(iter(results.arms))
    before = CpuTime.now()
    answers, took_s = asyncio.run(run_workload(url, workload))
    others = CpuTime.now().others_share(before, took_s)
    if is_first:
        expected[workload.name] = answers
    figures = figures_of(
        workload,
        answers,
        took_s,
        others,
        None if is_first else expected.get(workload.name),
        results.tolerance,
    )
    results.arms[arm].workloads[workload.name] = figures
    _say(
        f"{arm}, {workload.name}: {took_s:.1f} s, {figures.requests_per_s:.2f} requests/s, "
        f"TTFT p50 {figures.ttft_p50_ms:.0f} ms, {figures.failed} of {figures.asked} failed, "
        f"{figures.equal} of {figures.compared} answers equal"
    )


def write_results(
    results: Results, out: Path, judge: Callable[[Measured], Iterator[str]] = verdict
) -> None:
    """Write the figures, and then what `judge` concludes from them."""
    _replace(out / "results.json", results.json())
    results.verdict = [*judge(results.measured())]
    _replace(out / "results.json", results.json())
    _replace(out / "report.md", results.markdown().encode())
    _replace(out / "report.html", page(results).encode())


def _replace(path: Path, content: bytes) -> None:
    staging = path.with_name(f".{path.name}")
    staging.write_bytes(content)
    staging.replace(path)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
