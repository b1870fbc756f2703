import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import orjson
import pytest

from tests.fleet.processes import left, marked, new_mark, processes_of

RELAY = f"{sys.executable} -m epd.bench.relay {{port}} {{decode_urls}}"
URLS = "{encode_urls} {prefill_urls} {decode_urls}"
LEAST = f"{sys.executable} -m epd.bench.least {{port}} {URLS}"

HEALTHY = """
import sys
from aiohttp import web

async def health(request):
    return web.Response()

app = web.Application()
app.router.add_get("/health", health)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
"""
"""A server that is well, and does nothing."""

DIES = """
    import asyncio, os
    asyncio.get_running_loop().call_later(0.5, os._exit, 3)
    return web.Response()
""".strip()


EPD_BENCH = (sys.executable, "-m", "epd", "bench", "overhead", "--rounds", "1")


def bench(
    *flags: str, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*EPD_BENCH, "--seconds", "0.2", *flags],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_scenario_is_answered_by_every_contender(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    scenarios = ("text-json", "text-sse", "picture-100kb", "picture-1mb-reuse", "epd-sse")
    done = bench("--scenario", *scenarios, "--against", f"least={LEAST}", "--out", str(out))

    assert done.returncode == 0, done.stderr
    document = orjson.loads(out.read_bytes())
    assert document["kind"] == "overhead"
    assert [it["scenario"]["name"] for it in document["results"]] == list(scenarios)
    for result in document["results"]:
        assert set(result["contenders"]) == {"direct", "epd", "relay", "least"}
        assert all(it["done"] > 0 and it["failed"] == 0 for it in result["contenders"].values())
    assert "| text, JSON |" in done.stdout


def test_slower_than_recorded_is_an_error_and_as_fast_is_none(tmp_path: Path) -> None:
    recorded = tmp_path / "recorded.json"
    for ratio, code in ((0.001, 1), (1000.0, 0)):
        relay = {"relay": {"epd_ratio": ratio}}
        results = [{"scenario": {"name": "text-json"}, "contenders": relay}]
        recorded.write_bytes(orjson.dumps({"results": results}))
        done = bench("--scenario", "text-json", "--check", str(recorded))

        assert done.returncode == code, done.stderr
        assert "text-json: " in done.stdout
        assert ("slower than recorded: text-json" in done.stderr) is (code == 1)


def test_a_contender_that_ends_is_named_with_its_last_words() -> None:
    dead = "dead=python -c 'raise SystemExit(\"why\")'"
    done = bench("--scenario", "text-json", "--against", dead)

    assert done.returncode == 1
    assert "dead ended with code 1" in done.stderr
    assert "why" in done.stderr


def test_a_contender_that_refuses_requests_is_no_success(tmp_path: Path) -> None:
    script = tmp_path / "healthy.py"
    script.write_text(HEALTHY)
    healthy = f"healthy={sys.executable} {script} {{port}}"
    done = bench("--scenario", "text-json", "--against", healthy)

    assert done.returncode == 1
    assert "requests failed" in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rounds", "0"), "must be positive"),
        (("--scenario", "nonsense"), "invalid choice"),
        (("--against", "x"), "not of the form"),
        (("--against", "a/b=x"), "not of the form"),
        (("--against", "a=x {port.y}"), "has a place that is none"),
        (("--out", "/nonexistent/x"), "No such file"),
        (("--against", "epd=x"), "names that differ"),
        (("--check", "/nonexistent"), "No such file"),
    ],
)
def test_wrong_flags_are_said_in_a_line(flags: tuple[str, ...], message: str) -> None:
    done = bench(*flags)

    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        ({"results": []}, "holds none of the scenarios that are measured"),
        ({"kind": "serve", "runs": []}, "'results'"),
        (
            {"results": [{"scenario": {"name": "a"}, "contenders": {"relay": {"epd_ratio": "x"}}}]},
            "could not convert",
        ),
    ],
)
def test_a_check_that_checks_nothing_is_an_error(
    tmp_path: Path, recorded: object, message: str
) -> None:
    file = tmp_path / "recorded.json"
    file.write_bytes(orjson.dumps(recorded))
    done = bench("--scenario", "text-json", "--check", str(file))

    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_contender_that_cannot_be_started_leaves_no_other() -> None:
    mark = new_mark()
    done = bench(
        "--scenario", "text-json", "--against", "x=/nonexistent/program", environ=marked(mark)
    )

    assert done.returncode == 1
    assert "'/nonexistent/program'" in done.stderr
    assert "Traceback" not in done.stderr
    assert left(mark, 0) == {}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_whatever_ends_it_leaves_nothing(number: signal.Signals) -> None:
    mark = new_mark()
    command = [*EPD_BENCH, "--seconds", "60", "--scenario", "text-json"]
    with subprocess.Popen(command, env=marked(mark), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "text, JSON" in process.stderr.readline()
        folders = folders_of(mark)
        os.kill(process.pid, number)
        said = process.stderr.read()

    assert "Traceback" not in said
    assert left(mark) == {}
    assert len(folders) == 1
    assert not any(map(os.path.exists, folders))


def test_impatience_leaves_nothing_either() -> None:
    mark = new_mark()
    command = [*EPD_BENCH, "--seconds", "60", "--scenario", "text-json"]
    with subprocess.Popen(command, env=marked(mark), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "text, JSON" in process.stderr.readline()
        folders = folders_of(mark)
        while process.poll() is None:
            process.terminate()

    assert left(mark) == {}
    assert len(folders) == 1
    assert not any(map(os.path.exists, folders))


def folders_of(mark: str) -> set[str]:
    """What the processes with this mark have their store in."""
    found = (re.search(r"/\S+/epd-bench-\w+", it) for it in processes_of(mark).values())
    return {it[0].removeprefix("//") for it in found if it}


def test_a_contender_that_ends_while_it_is_measured_is_named(tmp_path: Path) -> None:
    script = tmp_path / "dying.py"
    script.write_text(HEALTHY.replace("return web.Response()", DIES))
    dying = f"dying={sys.executable} {script} {{port}}"
    done = bench("--scenario", "text-json", "--against", dying)

    assert done.returncode == 1
    assert "dying ended with code 3" in done.stderr
    assert "Traceback" not in done.stderr
