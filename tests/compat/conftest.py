from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compat.releases import Release, last_release, this_release
from tests.support.redis_server import RedisServer


@pytest.fixture(scope="session")
def last(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return last_release(tmp_path_factory.mktemp("last"))


@pytest.fixture(scope="session")
def releases(last: Release) -> tuple[Release, Release]:
    """Return this release, and the last one."""
    return this_release(), last


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server
