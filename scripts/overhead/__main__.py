"""Benchmark of the cost of the proxy itself, compared with other proxies in one run.

.venv/bin/python -m scripts.overhead --scenario text-json --rounds 3
"""

import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from epd.parser import Parser
from epd.tools.machine import machine
from epd.tools.up.process import ProcessDied
from epd.tools.up.signals import leave_contexts_on_signals
from epd.version import __version__
from scripts.overhead.rig import EPD, Contender, Rig, Running
from scripts.overhead.scenarios import DIRECT, SCENARIOS, Result, Sample, Scenario, table

PROGRAM = "python -m scripts.overhead"
REFERENCE = "epd"
BASELINE = "relay"
TOLERANCE = 1.5
"""Upper bound of the ratio to the relay's CPU time, as a multiple of the recorded ratio."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder in it has a unique name
DESCRIPTION = """Start fake engines that answer at once, this proxy and any other proxies, and put
the same load on one after the other. Each proxy runs on its own core. CPU time is that of its
processes, as the kernel counts it."""
EXAMPLE = """example: python -m scripts.overhead --against 'example=python disagg_epd_proxy.py
--port {port} --encode-servers-urls {encode_urls} --prefill-servers-urls {prefill_urls}
--decode-servers-urls {decode_urls}'"""


def main() -> None:
    """Run the benchmark. The exit code is 2 for invalid flags and 1 for a failure."""
    names = [scenario.name for scenario in SCENARIOS]
    parser = Parser(prog=PROGRAM, description=DESCRIPTION, epilog=EXAMPLE)
    parser.add_argument(
        "--scenario",
        dest="scenarios",
        nargs="+",
        choices=names,
        default=names,
        metavar="NAME",
        help=f"scenarios to run: {', '.join(names)} (default: all)",
    )
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="another proxy to measure; {port}, {encode_urls}, {prefill_urls}, {decode_urls} and "
        "{ec_store} are replaced; its /health must answer 200",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="turns of each proxy (default: 5)"
    )
    parser.add_argument(
        "--seconds", type=float, default=3.0, metavar="S", help="seconds per turn (default: 3)"
    )
    parser.add_argument(
        "--epd-flags", default="", metavar="FLAGS", help="additional flags for `epd serve`"
    )
    parser.add_argument(
        "--ec-store",
        metavar="URL",
        help="URL of the encoder store (default: a folder in shared memory)",
    )
    parser.add_argument(
        "--proxy-cores", type=int, default=1, metavar="N", help="cores per proxy (default: 1)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="file for all figures, as JSON")
    parser.add_argument(
        "--check",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="earlier results: exit with 1 if the ratio of the CPU time to the relay's is more "
        f"than {TOLERANCE} times the recorded one; of several files, those of this machine's "
        "processor are used, or all if there are none",
    )
    _run(parser, **vars(parser.parse_args()))


def _run(  # noqa: PLR0913 - one parameter per flag
    parser: Parser,
    *,
    scenarios: Sequence[str],
    against: Sequence[str],
    rounds: int,
    seconds: float,
    epd_flags: str,
    ec_store: str | None,
    proxy_cores: int,
    out: Path | None,
    check: Sequence[Path] | None,
) -> None:
    if rounds < 1 or proxy_cores < 1 or seconds <= 0:
        parser.error("--rounds, --seconds and --proxy-cores must be positive")
    try:
        texts = (f"{REFERENCE}={EPD} {epd_flags}", *against)
        contenders = [Contender.parse(text) for text in texts]
    except ValueError as error:
        parser.error(f"--against {error}")
    if check is not None and BASELINE not in {contender.name for contender in contenders}:
        parser.error(f"--check needs --against {BASELINE}=COMMAND")
    recorded = None if check is None else _recorded(parser, check, scenarios)
    chosen = [scenario for scenario in SCENARIOS if scenario.name in scenarios]
    leave_contexts_on_signals()
    try:
        with _folder() as folder:
            store = ec_store or f"file://{folder}/store?max_bytes=256MiB"
            rig = Rig(contenders, folder, store, proxy_cores=proxy_cores)
            results = list(_results(rig, chosen, rounds, seconds))
    except (ProcessDied, OSError) as error:
        sys.exit(f"overhead: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped")
    print("\n".join(["", *table(results, REFERENCE)]))
    if out is not None:
        out.write_bytes(_document(results))
    if recorded is not None:
        _compare(results, recorded)
    if any(result.median(name).failed for result in results for name in result.turns):
        sys.exit("overhead: requests failed")


@contextmanager
def _folder() -> Iterator[Path]:
    """Create a folder for logs and the store."""
    memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="epd-bench-", dir=memory) as made:
        yield Path(made)


def _results(
    rig: Rig, scenarios: Sequence[Scenario], rounds: int, seconds: float
) -> Iterator[Result]:
    """Yield the result of each scenario; scenarios that share processes run in a row."""
    lasting = [scenario for scenario in scenarios if not scenario.fresh]
    groups = [
        [scenario for scenario in lasting if not scenario.prefill],
        [scenario for scenario in lasting if scenario.prefill],
        *([scenario] for scenario in scenarios if scenario.fresh),
    ]
    for group in filter(None, groups):
        with rig.run_contenders(prefill=group[0].prefill) as running:
            for scenario in group:
                yield _result(rig, scenario, running, rounds, seconds)


def _result(rig: Rig, scenario: Scenario, running: Running, rounds: int, seconds: float) -> Result:
    print(f"{scenario.title} …", file=sys.stderr)
    turns: dict[str, list[Sample]] = {DIRECT: []}
    turns |= {contender.name: [] for contender in running.contenders}
    if not scenario.fresh:
        for contender in running.contenders:
            rig.warm_up(scenario, contender)
    for number in range(1 if scenario.fresh else rounds):
        turns[DIRECT].append(rig.measure_direct(scenario, running.url, seconds))
        # Rotated, so that each round starts with another contender.
        start = number % len(running.contenders)
        for contender in (*running.contenders[start:], *running.contenders[:start]):
            turns[contender.name].append(rig.measure(scenario, contender, seconds))
    return Result(scenario, turns)


def _document(results: Sequence[Result]) -> bytes:
    document = {
        "kind": "overhead",
        "epd_version": __version__,
        "machine": machine(),
        "command": shlex.join([*PROGRAM.split(), *sys.argv[1:]]),
        "results": [result.json(REFERENCE) for result in results],
    }
    return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _recorded(
    parser: Parser, paths: Sequence[Path], scenarios: Sequence[str]
) -> Mapping[str, float]:
    """Read the recorded ratios to the relay by scenario, at least one of `scenarios`.

    A ratio depends on the processor: one commit needed 1.03 and 1.52 times the relay's CPU time for
    a stream on two processors. So files of other processors are used only if no file is from this
    processor. Of several files, the largest ratio applies.
    """
    by_processor: dict[bool, dict[str, float]] = {True: {}, False: {}}
    for path in paths:
        document: dict[str, Any] = orjson.loads(path.read_bytes())
        recorded = by_processor[document["machine"]["cpu"] == machine()["cpu"]]
        for result in document["results"]:
            name = result["scenario"]["name"]
            ratio = float(result["contenders"][BASELINE][f"{REFERENCE}_ratio"])
            recorded[name] = max(ratio, recorded.get(name, ratio))
    recorded = by_processor[True] or by_processor[False]
    if not recorded.keys() & set(scenarios):
        parser.error(f"--check {shlex.join(map(str, paths))}: has no scenario of this run")
    return recorded


def _compare(results: Sequence[Result], recorded: Mapping[str, float]) -> None:
    slower = []
    print()
    for result in results:
        name = result.scenario.name
        before, now = recorded.get(name), result.ratio(REFERENCE, BASELINE)
        if before is None:
            continue
        print(f"{name}: {now:.2f} times the relay's CPU time, recorded {before:.2f}")
        if not now <= before * TOLERANCE:  # true if `now` is NaN, too
            slower.append(name)
    if slower:
        sys.exit(f"overhead: slower than recorded: {', '.join(slower)}")


if __name__ == "__main__":
    main()
