"""`scripts/demo.sh`, as a new user runs it."""

import subprocess
import sys

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
        "encode: skipped",
        "first token ",
        "random weights",
        "image, F32, 294 x 256",
        "stopped",
    ):
        assert words in ran.stdout
    assert processes_of(mark) == {}
