import subprocess
import sys

import pytest

from epd.workers import process

FAULTS = """
import resource, sys
from epd.workers.process import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

kept = keep_freed_memory() if sys.argv[1] == "kept" else None
for _ in range(2):
    bodies = [bytearray(6_000_000) for _ in range(4)]
    del bodies
before = faults()
for _ in range(10):
    bodies = [bytearray(6_000_000) for _ in range(4)]
    del bodies
print(kept, faults() - before)
"""
PAGES = 4 * 6_000_000 // 4096
"""Memory pages of the four bodies."""


def _run(how: str) -> tuple[str, int]:
    ran = subprocess.run(
        [sys.executable, "-c", FAULTS, how],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    kept, faults = ran.stdout.split()
    return kept, int(faults)


def test_freed_bodies_are_used_again_without_page_faults() -> None:
    without, (kept, faults) = _run("as it is")[1], _run("kept")
    if kept == "False":
        pytest.skip("this C library has no mallopt")

    assert without >= 10 * PAGES / 2
    assert faults < PAGES


@pytest.mark.parametrize("name", process.OPERATORS)
def test_settings_of_the_operator_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "")

    assert not process.keep_freed_memory()
