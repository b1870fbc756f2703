"""Fixtures of these tests: a server with a small memory, and a store in it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ec_store.arena.server import ArenaServer
from ec_store.arena.store import ArenaStore
from tests.ec_store.arena.served import MIB, Serve, opened, serving


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
