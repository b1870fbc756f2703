"""Entries that are read and written in the host's memory itself."""

import gc
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from ec_store import Entry
from ec_store.arena import store as arena_store
from ec_store.arena.connection import ArenaConnection
from ec_store.arena.protocol import GetStats, Stats
from ec_store.arena.server import ArenaServer
from ec_store.arena.store import ArenaStore
from ec_store.arena.url import ArenaOptions
from ec_store.errors import StoreUnavailable
from ec_store.testing.stores import assert_same, entry, key, sized
from tests.ec_store.arena.served import MIB, serving

KEPT = [*range(0, 6, 2), 6, 7]


@pytest.fixture
def server(path: Path) -> Iterator[ArenaServer]:
    with serving(path, 8 * MIB, segment_bytes=4 * MIB) as server:
        yield server


def stats(store: ArenaStore) -> Stats:
    """Return the server's statistics, after all releases of the store have been sent."""
    gc.collect()
    return store.connection.call(GetStats())[0]


def divide(store: ArenaStore) -> Entry:
    """Leave holes of 1 MiB only, and return an entry of 2.5 MiB, which is stored in them."""
    for number in range(8):
        store.put(key(str(number)), sized(MIB))
    store.lease([key(str(number)) for number in KEPT], 60)
    store.delete([key(str(number)) for number in (1, 3, 5)])
    entry = sized(5 * MIB // 2)
    store.put(key("divided"), entry)
    return entry


def test_an_entry_in_several_extents_is_pinned_in_place(store: ArenaStore, path: Path) -> None:
    entry = divide(store)
    pinned = store.pin(key("divided"))
    assert pinned is not None
    reader = ArenaConnection(str(path), "reader", 10)
    mapped = reader.call(GetStats())[1]
    parts = mapped.parts(pinned.place.extents, pinned.place.size_bytes)

    assert len(pinned.place.extents) == 3
    assert pinned.place.arena == mapped.name
    assert b"".join(pinned.parts) == entry.data.tobytes()
    assert b"".join(part.tobytes() for part in parts) == entry.data.tobytes()
    reader.close()


def test_an_entry_is_written_in_place_and_appears_at_its_commit(store: ArenaStore) -> None:
    entry = sized(MIB)
    write = store.begin(key(), MIB)
    assert write is not None
    [part] = write.parts
    np.copyto(part, np.frombuffer(entry.data, np.uint8))
    assert store.get(key()) is None
    assert write.commit(entry)

    found = store.get(key())
    assert found is not None
    assert_same(found, entry)
    assert store.begin(key(), MIB) is None
    assert store.counts["puts"] == 1


def test_a_write_that_is_given_up_leaves_nothing(store: ArenaStore) -> None:
    write = store.begin(key(), MIB)
    assert write is not None
    assert stats(store).memory.begun_bytes == MIB
    write.abort()

    found = stats(store)
    assert (found.memory.begun_bytes, found.taken_bytes, found.entries) == (0, 0, 0)


def test_an_entry_that_another_writes_is_asked_for_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, attempts = 0.0, 0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(time, "sleep", sleep)
    for _ in arena_store._attempts(10):  # noqa: SLF001
        attempts += 1

    assert now_s == pytest.approx(10)
    assert 280 < attempts < 290


def test_a_write_with_metadata_that_are_no_json_leaves_nothing(store: ArenaStore) -> None:
    with pytest.raises(TypeError):
        store.put(key(), entry(metadata={"no JSON": object()}))

    assert stats(store).memory.begun_bytes == 0
    assert store.put(key(), entry()) is True


def test_a_write_ends_with_the_server_it_was_begun_in(path: Path) -> None:
    """The place is in the memory of the old server: the new one must not store it."""
    with ExitStack() as servers, ArenaStore(ArenaOptions(str(path), timeout_s=10)) as store:
        first = servers.enter_context(ExitStack())
        first.enter_context(serving(path, 8 * MIB))
        kept, given_up = store.begin(key("a"), MIB), store.begin(key("b"), MIB)
        assert kept is not None
        assert given_up is not None
        first.close()
        gc.collect()  # the lock of the path is closed with the socket's object
        servers.enter_context(serving(path, 8 * MIB))
        with pytest.raises(StoreUnavailable):
            kept.commit(sized(MIB))
        given_up.abort()

        assert store.lookup([key("a"), key("b")]) == [None, None]
        assert store.counts["drops"] == 1
        assert store.put(key("a"), sized(MIB))


SCHEDULER = """
import sys, time
from ec_store.arena import store as arena_store
from ec_store.arena.store import ArenaStore
from ec_store.arena.url import ArenaOptions
from ec_store.engine.region import Region
from ec_store.testing.stores import key
store, region = ArenaStore(ArenaOptions(sys.argv[1], timeout_s=10), "reader"), Region(0, 2)
path, size_bytes, token = region.shared_region().handle
print(path, size_bytes, token.hex(), flush=True)
entry = store.pin(key())
while not region.have_mapped(entry.place.arena):
    time.sleep(0.01)
region.send([entry])
del entry
print("sent", flush=True)
while True:
    region.release()
    store.connection.settle()
    time.sleep(0.01)
"""

RANK = """
import sys, time
from ec_store.arena import store as arena_store
from ec_store.arena.store import ArenaStore
from ec_store.arena.url import ArenaOptions
from ec_store.engine.region import RegionHandle, RegionReader
socket, number, path, size_bytes, token = sys.argv[1:]
store = ArenaStore(ArenaOptions(socket, timeout_s=10), "reader")
store.check()
reader = RegionReader(RegionHandle(path, int(size_bytes), bytes.fromhex(token)), int(number))
reader.has_read(0)
reader.has_mapped(store.connection.arena.name)
sys.stdin.readline()
reader.has_read(1)
print("read", flush=True)
time.sleep(60)
"""


def child(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path.cwd(),
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.fault(101)
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_pins_of_a_step_outlive_a_rank_and_end_with_the_engine(
    store: ArenaStore, path: Path
) -> None:
    store.put(key(), sized(MIB))
    with ExitStack() as engine:
        scheduler = engine.enter_context(child(SCHEDULER, str(path)))
        engine.callback(scheduler.kill)
        handle = line(scheduler).split()
        ranks = [child(RANK, str(path), str(number), *handle) for number in range(2)]
        for rank in ranks:
            engine.enter_context(rank)
            engine.callback(rank.kill)
        assert line(scheduler) == "sent\n"
        ranks[0].send_signal(signal.SIGKILL)
        ranks[0].wait()
        assert ranks[1].stdin is not None
        ranks[1].stdin.write("\n")
        ranks[1].stdin.flush()
        assert line(ranks[1]) == "read\n"
        held = stats(store).memory.pinned_bytes
        for one in (scheduler, ranks[1]):
            one.send_signal(signal.SIGKILL)

    assert held == MIB
    deadline_s = time.monotonic() + 10
    while stats(store).memory.pinned_bytes:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
