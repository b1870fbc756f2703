from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from ec_store import Store, open_store
from epd.aio import Flights, Start
from epd.tenants import key_line
from tests.support.backed import NAMESPACE, Backed, Both
from tests.support.clients import ALICE, ALICE_2, BOB
from tests.support.fleet import Fleet, Launch
from tests.support.invariants import WatchedLaunch


@pytest.fixture
def launch() -> Launch:
    return WatchedLaunch()


@pytest.fixture
async def fleet(launch: Launch) -> AsyncIterator[Fleet]:
    """Yield a proxy with one instance of each role."""
    async with launch(prefill=1) as running:
        yield running


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return the keys of shared runs; each request that waits for a run adds its key."""
    keys: list[object] = []
    join = Flights.join

    async def joins(self: Flights[Any, Any], key: object, start: Start[Any]) -> object:
        keys.append(key)
        return await join(self, key, start)

    monkeypatch.setattr(Flights, "join", joins)
    return keys


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with open_store(url) as opened:
        opened.register_namespace("m", NAMESPACE)
        yield opened


@pytest.fixture
def backed(store: Store, tmp_path: Path) -> Backed:
    return Backed(store, tmp_path / "store")


@pytest.fixture
def both(store: Store, tmp_path: Path) -> Both:
    return Both(store, tmp_path / "store")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    pairs = [("alice", ALICE), ("bob", BOB), ("alice", ALICE_2)]
    path = tmp_path / "keys"
    path.write_text("# ours\n" + "\n".join(key_line(*pair) for pair in pairs) + "\n")
    path.chmod(0o600)
    return path
