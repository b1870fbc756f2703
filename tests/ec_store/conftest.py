"""Folder of a store on disk, Redis server of a module, and Redis clusters."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.redis_server import RedisServer, StartCluster, cluster


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the folder of a store, which does not exist yet."""
    return tmp_path / "store"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def client(server: RedisServer) -> Any:
    client: Any = server.client
    client.flushall()
    return client


@pytest.fixture
def start_cluster(tmp_path: Path) -> StartCluster:
    return partial(cluster, tmp_path)
