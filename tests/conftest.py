"""Options and fixtures for all tests."""

import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.models import written

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("untimed"), max_examples=20)
settings.load_profile("untimed")

NOT_QUICK = frozenset({"stack", "browser", "models", "redis_cluster", "start_cluster"})
"""Fixtures that start engines, a browser or a Redis Cluster, or build models."""


def pytest_configure() -> None:
    """Restore the default handling of SIGHUP, which `nohup` sets to ignore."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the tier that its fixtures need."""
    for item in items:
        if NOT_QUICK.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("full")


@pytest.fixture(scope="session")
def models() -> Path:
    """Return the directory with the tiny models that most tests use."""
    return written()
