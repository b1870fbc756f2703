"""Redis server for each module, emptied for each test that uses its client; and clusters."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.store.redis_server import RedisServer, StartCluster, cluster


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
