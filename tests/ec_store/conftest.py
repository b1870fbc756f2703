"""Folder of a store on disk, Redis server of a module, and Redis clusters."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.redis_server import RedisServer, StartCluster, cluster


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the folder of a store, which does not exist yet."""
    return tmp_path / "store"


NoThreads = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> NoThreads:
    """Return a context in which no thread can be started, as at a limit of processes."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    @contextmanager
    def refusing() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            yield

    return refusing


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
