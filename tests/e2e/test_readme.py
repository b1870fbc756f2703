"""The commands of the README, typed in order after its `epd up`."""

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.ports import free_ports
from tests.e2e.stacks import VISION
from tests.paths import ROOT

README = (ROOT / "README.md").read_text()
UP = re.compile(r"^    epd up --model \S+ (--topology \S+)", re.MULTILINE)
CURL = re.compile(r"^```bash\n(curl .*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_picture_of_the_readme_is_a_miss_and_then_a_hit(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    port, *others = free_ports(3)
    flags = ("--port", port, "--prefill-decode-port", others[0], "--ec-store-port", others[1])
    started = UP.search(README)
    curl = CURL.search(README)
    assert started is not None
    assert curl is not None
    program = [sys.executable, "-m", "tests.e2e.forked_up", "up", "--device", "cpu"]
    command = [*program, "--model", models / VISION, *shlex.split(started[1]), *flags]
    with subprocess.Popen(
        [*map(str, command), "--log-path", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as up:
        try:
            assert up.stdout is not None
            assert any(line.startswith("ready: ") for line in up.stdout)
            sent = curl[1].replace("localhost:8000", f"localhost:{port}")
            items = [re.search(r"x-epd-items: \S+", output(sent)) for _ in range(2)]
            stat = output(f"{sys.executable} -m ec_store stat")
        finally:
            up.send_signal(signal.SIGINT)

    assert [found and found[0] for found in items] == [
        "x-epd-items: hit=0,encoded=0,local=1",
        "x-epd-items: hit=1,encoded=0,local=0",
    ]
    assert all(found and found[0].removeprefix("x-epd-items: ") in README for found in items)
    assert re.search(r"^entries +1$", stat, re.MULTILINE)


def output(command: str) -> str:
    """Return what a command line of a shell prints."""
    done = subprocess.run(  # noqa: S602 - a line of the README
        command, shell=True, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout
