"""Tiny models that the tests serve."""

import fcntl
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def written(*names: str) -> Path:
    """Return the directory of tiny models after writing the named ones, or the default ones.

    Among parallel test processes, only one writes them.
    """
    directory = ROOT / ".run" / "models"
    directory.mkdir(parents=True, exist_ok=True)
    script = ROOT / "scripts" / "tiny_models.py"
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run([sys.executable, script, directory, *names], check=True)
    return directory
