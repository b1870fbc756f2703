"""What several kinds of tests share."""

import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.models import written

ROOT = Path(__file__).resolve().parents[1]

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_configure() -> None:
    """Ignore no signal that tests send: `nohup` passes on that SIGHUP is."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def models() -> Path:
    """A directory with the tiny models of most tests."""
    return written()
