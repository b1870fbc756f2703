"""`scripts/demo.sh --keep`, as a new user runs it."""

import re
import signal
import subprocess
import sys

import pytest

from tests.paths import ROOT
from tests.tools.up.processes import marked, new_mark, processes_of

ITEMS = re.compile(r"x-epd-items: (\S+)")
TRIES = 4
"""Requests with the same picture: on a busy machine a look-up exceeds its budget."""
DEMO = [sys.executable, str(ROOT / "scripts" / "demo.py"), "--keep"]


@pytest.fixture
def mark() -> str:
    return new_mark()


def test_the_demo_answers_shows_its_urls_and_stops_everything(mark: str) -> None:
    said, sent, looked = "", [], []
    with subprocess.Popen(
        DEMO, env=marked(mark), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            said += line
            if line.startswith("  curl "):
                sent = [shell(line) for _ in range(TRIES)]
            elif found := re.search(r"^  .* ((?:epd|ec-store) .*)", line):
                looked.append(
                    shell(f"{sys.executable} -m {found[1].replace('ec-store', 'ec_store', 1)}")
                )
            if "ec-store stat" in line:
                demo.send_signal(signal.SIGINT)

    assert demo.returncode == 0, said
    for words in (
        "cat.jpg",
        "encode: skipped",
        "first token ",
        "random weights",
        "image, F32, 294 x 256",
        "stopped",
    ):
        assert words in said
    items = [found and found[1] for found in (ITEMS.search(answer) for answer in sent)]
    assert items[0] == "hit=0,encoded=1,local=0"
    assert "hit=1,encoded=0,local=0" in items[1:]
    assert len(looked) == 3
    assert processes_of(mark) == {}


def shell(command: str) -> str:
    done = subprocess.run(  # noqa: S602 - a line of the demo
        command, shell=True, capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout
