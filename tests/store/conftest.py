"""A Redis server of a module's own, empty for each test that asks for its client."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.store.redis_server import RedisServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def client(server: RedisServer) -> Any:
    client: Any = server.client
    client.flushall()
    return client
