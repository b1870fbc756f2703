"""What several kinds of tests share."""

import fcntl
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_configure() -> None:
    """Ignore no signal that tests send: `nohup` passes on that SIGHUP is."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def models() -> Path:
    """A directory with the tiny models."""
    directory = ROOT / ".run" / "models"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:  # of several test processes, one writes them
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run([sys.executable, ROOT / "scripts" / "tiny_models.py", directory], check=True)
    return directory
