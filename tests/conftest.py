"""What several kinds of tests share."""

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
    """Ignore no signal that tests send: `nohup` passes on that SIGHUP is."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests the tier of their fixtures."""
    for item in items:
        if NOT_QUICK.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("full")


@pytest.fixture(scope="session")
def models() -> Path:
    """Return a directory with the tiny models of most tests."""
    return written()
