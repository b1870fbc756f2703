"""Fixtures of these tests: a server with a small memory, a store in it, and a Redis."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ec_store.arena.server import ArenaServer
from ec_store.arena.store import ArenaStore
from tests.ec_store.arena.served import MIB, Serve, opened, serving
from tests.support.redis_server import RedisServer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "arena.sock"


@pytest.fixture
def server(path: Path) -> Iterator[ArenaServer]:
    """Run a server on a thread; an entry above 1 MiB is in several extents."""
    with serving(path, 8 * MIB, segment_bytes=MIB) as server:
        yield server


@pytest.fixture
def store(path: Path, server: ArenaServer) -> Iterator[ArenaStore]:
    with opened(path) as store:
        yield store


@pytest.fixture
def served(path: Path) -> Iterator[Serve]:
    """Run `ec-store serve`."""
    with Serve(path) as served:
        yield served


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis(redis_server: RedisServer) -> RedisServer:
    """Return an empty Redis."""
    redis_server.client.flushall()
    return redis_server
