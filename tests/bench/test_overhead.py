import subprocess
import sys
from pathlib import Path

import orjson
import pytest

RELAY = f"{sys.executable} -m epd.bench.relay {{port}} {{decode_urls}}"

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


def bench(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "epd", "bench", "overhead", "--rounds", "1"]
    return subprocess.run(
        [*command, "--seconds", "0.2", *flags], capture_output=True, text=True, check=False
    )


def test_every_scenario_is_answered_by_every_contender(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    scenarios = ("text-json", "text-sse", "picture-100kb", "picture-1mb-reuse", "epd-sse")
    done = bench("--scenario", *scenarios, "--against", f"other={RELAY}", "--out", str(out))

    assert done.returncode == 0, done.stderr
    document = orjson.loads(out.read_bytes())
    assert document["kind"] == "overhead"
    assert [it["scenario"]["name"] for it in document["results"]] == list(scenarios)
    for result in document["results"]:
        assert set(result["contenders"]) == {"direct", "epd", "relay", "other"}
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
        (("--against", "epd=x"), "names that differ"),
        (("--check", "/nonexistent"), "No such file"),
    ],
)
def test_wrong_flags_are_said_in_a_line(flags: tuple[str, ...], message: str) -> None:
    done = bench(*flags)

    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
