import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson
import pytest

from epd.tools.machine import machine
from tests.paths import ROOT
from tests.tools.up.processes import left, marked, new_mark, processes_of

pytestmark = pytest.mark.full

RELAY = f"{sys.executable} {ROOT}/scripts/overhead/relay.py {{port}} {{decode_urls}}"
BASELINE = ("--against", f"relay={RELAY}")

HEALTHY = """
import sys
from aiohttp import web

async def health(request):
    return web.Response()

app = web.Application()
app.router.add_get("/health", health)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
"""
"""Server that is healthy and does nothing else."""


OVERHEAD = (sys.executable, "-m", "scripts.overhead", "--rounds", "1")


def bench(
    *flags: str, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*OVERHEAD, "--seconds", "0.2", *flags],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


OURS = machine()["cpu"]


def record(path: Path, ratio: float, cpu: object = OURS, scenario: str = "text-json") -> str:
    """Write the results of one scenario to a file for `--check`."""
    relay = {"relay": {"epd_ratio": ratio}}
    results = [{"scenario": {"name": scenario}, "contenders": relay}]
    path.write_bytes(orjson.dumps({"machine": {"cpu": cpu}, "results": results}))
    return str(path)


Records = Mapping[str, Sequence[tuple[float, object]]]
"""Recorded ratios by scenario, each with its processor. No measured ratio is below 0.001 or above
1000."""

OF_THIS_PROCESSOR: Records = {
    "text-json": [(0.001, OURS)],
    "text-sse": [(1000.0, OURS), (0.001, "another")],
    "picture-100kb": [(1000.0, "another"), (0.001, OURS)],
    "picture-1mb-reuse": [(0.001, "another")],
    "epd-sse": [(1000.0, OURS), (0.001, OURS)],
}


def bench_with_check(
    folder: Path, records: Records, *flags: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Return the completed benchmark of the recorded scenarios, and those slower than recorded."""
    files = [
        record(folder / f"{scenario}-{number}.json", *recorded, scenario)
        for scenario, several in records.items()
        for number, recorded in enumerate(several)
    ]
    done = bench("--scenario", *records, *BASELINE, *flags, "--check", *files)
    lines = re.findall(r"slower than recorded: (.*)", done.stderr)
    assert done.returncode == len(lines), done.stderr
    return done, lines[0].split(", ") if lines else []


def test_every_scenario_is_answered_and_checked_against_the_records_of_this_processor(
    tmp_path: Path,
) -> None:
    out = tmp_path / "results.json"
    done, slower = bench_with_check(tmp_path, OF_THIS_PROCESSOR, "--out", str(out))

    document = orjson.loads(out.read_bytes())
    assert document["kind"] == "overhead"
    assert [it["scenario"]["name"] for it in document["results"]] == list(OF_THIS_PROCESSOR)
    for result in document["results"]:
        assert set(result["contenders"]) == {"direct", "epd", "relay"}
        assert all(it["done"] > 0 and it["failed"] == 0 for it in result["contenders"].values())
    assert "| text, JSON, 32 at once |" in done.stdout
    compared = [scenario for scenario in OF_THIS_PROCESSOR if f"{scenario}: " in done.stdout]
    assert compared == ["text-json", "text-sse", "picture-100kb", "epd-sse"]
    assert slower == ["text-json", "picture-100kb"]


def test_records_of_other_processors_count_if_this_one_has_none(tmp_path: Path) -> None:
    others = {"text-json": [(0.001, "another")], "text-sse": [(1000.0, "b"), (0.001, "c")]}
    done, slower = bench_with_check(tmp_path, others)

    assert all(f"{scenario}: " in done.stdout for scenario in others)
    assert slower == ["text-json"]


def test_a_contender_that_refuses_requests_is_no_success(tmp_path: Path) -> None:
    script = tmp_path / "healthy.py"
    script.write_text(HEALTHY)
    healthy = f"healthy={sys.executable} {script} {{port}}"
    done = bench("--scenario", "text-json", "--against", healthy)

    assert done.returncode == 1
    assert "requests failed" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_process_is_left_however_the_benchmark_ends(number: signal.Signals) -> None:
    mark = new_mark()
    command = [*OVERHEAD, "--seconds", "60", "--scenario", "text-json"]
    with subprocess.Popen(command, env=marked(mark), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "text, JSON" in process.stderr.readline()
        folders = folders_of(mark)
        os.kill(process.pid, number)
        said = process.stderr.read()

    assert "Traceback" not in said
    assert left(mark) == {}
    assert len(folders) == 1
    assert any(map(os.path.exists, folders)) == (number == signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def folders_of(mark: str) -> set[str]:
    """Return the store folders of the processes with this mark."""
    found = (re.search(r"/\S+/epd-bench-\w+", it) for it in processes_of(mark).values())
    return {it[0].removeprefix("//") for it in found if it}
