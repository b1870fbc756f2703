import os
import sys
import time
from pathlib import Path

from scripts.overhead.rig import EPD, Contender, Measured

FORKS = """
import subprocess, sys, time
burn = "import time; end = time.process_time() + 0.5\\nwhile time.process_time() < end: pass"
subprocess.run([sys.executable, "-c", burn])
print("burnt", flush=True)
time.sleep(600)
"""
"""Program with a child that does all the work and then ends."""

FILLED = dict.fromkeys(("port", "encode_urls", "prefill_urls", "decode_urls", "ec_store"), "7")


def test_the_command_of_epd_has_all_places_filled() -> None:
    argv = Contender.parse(f"x={EPD}").argv(FILLED)

    assert not [word for word in argv if "{" in word]
    assert "7" in argv


def test_cpu_time_includes_children_that_have_ended(tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(FORKS)
    contender = Contender("forks", (sys.executable, str(tmp_path / "forks.py")))
    log = tmp_path / "log"
    one = Measured(contender, {"port": "1"}, log, os.sched_getaffinity(0))
    while "burnt" not in log.read_text():
        time.sleep(0.05)
        one.process.check_alive()
    used_s = one.cpu_s()
    one.process.kill()

    assert used_s >= 0.5
