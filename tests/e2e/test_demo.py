"""`scripts/demo.sh`, as a new user runs it."""

import signal
import subprocess
import sys
import time

import pytest

from tests.paths import ROOT
from tests.tools.up.processes import marked, new_mark, processes_of

DEMO = [sys.executable, str(ROOT / "scripts" / "demo.py")]


@pytest.fixture
def mark() -> str:
    return new_mark()


def test_the_demo_answers_shows_its_urls_and_stops_everything(mark: str) -> None:
    environ = marked(mark)
    ran = subprocess.run(
        DEMO, env=environ, capture_output=True, text=True, timeout=900, check=False
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr
    for words in (
        "cat.jpg",
        "encode ",
        "decode ",
        "random weights",
        "image, F32, 294 x 256",
        "stopped",
    ):
        assert words in ran.stdout
    assert processes_of(mark) == {}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_starts_leaves_no_process(mark: str, number: signal.Signals) -> None:
    environ = marked(mark)
    with subprocess.Popen(
        [*DEMO, "--topology", "1e1pd"], env=environ, stdout=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if line.startswith("starting proxy"):
                break
        deadline = time.monotonic() + 300
        while len(processes_of(mark)) <= 4:  # an engine has started its processes
            assert time.monotonic() < deadline
            time.sleep(0.1)
        demo.send_signal(number)
        demo.stdout.read()

    assert demo.returncode == 1
    assert processes_of(mark) == {}
