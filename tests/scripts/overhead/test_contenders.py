import os
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.tools.up.process import stop
from scripts.overhead.rig import EPD, PLACES, Contender, Measured

FORKS = """
import subprocess, sys, time
burn = "import time; end = time.process_time() + 0.5\\nwhile time.process_time() < end: pass"
subprocess.run([sys.executable, "-c", burn])
print("burnt", flush=True)
time.sleep(600)
"""
"""Program with a child that does all the work and then ends."""

FILLED = dict.fromkeys(PLACES, "7")
WORDS = st.lists(st.from_regex(r"[a-z./:-]+", fullmatch=True), min_size=1)


@given(st.from_regex(r"[a-z0-9-]+", fullmatch=True), WORDS, st.sampled_from(PLACES))
def test_a_command_line_is_split_and_its_places_are_filled(
    name: str, words: list[str], place: str
) -> None:
    contender = Contender.parse(f"{name}={' '.join(words)} --flag={{{place}}}")

    assert contender.name == name
    assert contender.argv(FILLED) == [*words, "--flag=7"]


def test_the_command_of_epd_has_all_places_filled() -> None:
    argv = Contender.parse(f"x={EPD}").argv(FILLED)

    assert not [word for word in argv if "{" in word]
    assert "7" in argv


@pytest.mark.parametrize(
    "text", ["", "x", "x=", "=python", "x=python {host}", "x=python {0}", "x={"]
)
def test_an_invalid_contender_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"place|form"):
        Contender.parse(text)


def test_cpu_time_includes_children_that_have_ended(tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(FORKS)
    contender = Contender("forks", (sys.executable, str(tmp_path / "forks.py")))
    log = tmp_path / "log"
    one = Measured(contender, {"port": "1"}, log, os.sched_getaffinity(0))
    while "burnt" not in log.read_text():
        time.sleep(0.05)
        one.process.check_alive()
    used_s = one.cpu_s()
    stop([one.process])

    assert used_s >= 0.5
