"""Memory of a fetcher: mapped memory stays close to the counted, for entries of all sizes."""

import time
from pathlib import Path

import pytest

from ec_store import Entry, EntryKey, open_store
from ec_store.buffers import Buffers
from ec_store.disk.store import SharedDiskStore
from ec_store.engine.entry_memory import LARGE_BYTES, OVERHEAD_BYTES, buffer_bytes, entry_bytes
from ec_store.engine.fetch_queue import Want
from ec_store.engine.fetcher import Fetcher, FetchState
from tests.ec_store.entries import entry

MIB = 2**20


WITHIN_S = 30.0


def mapped_bytes(buffers: Buffers) -> int:
    return sum(map(len, buffers._lent))  # noqa: SLF001 - not visible from outside


class Same:
    """Store of two entries that can be read under any name, each time into a new buffer."""

    def __init__(self, store: SharedDiskStore, sizes: tuple[int, int]) -> None:
        self._store = store
        for kind, size in enumerate(sizes):
            store.put(EntryKey("ns", str(kind)), entry(shape=(size // 2,)))

    def get(self, key: EntryKey) -> Entry | None:
        """Return the entry that the first letter of the name selects."""
        return self._store.get(EntryKey("ns", key.identifier[0]))


class Watched:
    """Fetcher of a disk store, with the peaks of counted and mapped bytes."""

    def __init__(self, store: SharedDiskStore, budget_bytes: int, sizes: tuple[int, int]) -> None:
        self.fetcher = Fetcher(Same(store, sizes), "ns", memory_bytes=budget_bytes)
        self.counted_bytes = self.mapped_bytes = self.pinned_bytes = 0
        self._buffers = store._files._buffers  # noqa: SLF001

    def look(self) -> set[str]:
        """Return the names that have become ready."""
        ready = {
            name for name, state in self.fetcher.process_results() if state is FetchState.READY
        }
        gauges = self.fetcher.gauges()
        counted = gauges["held_bytes"] + gauges["queued_bytes"] + gauges["inflight_bytes"]
        self.counted_bytes = max(self.counted_bytes, int(counted))
        self.pinned_bytes = max(self.pinned_bytes, int(gauges["pinned_bytes"]))
        self.mapped_bytes = max(self.mapped_bytes, mapped_bytes(self._buffers))
        return ready

    def fetch(self, names: list[str], size_bytes: int) -> list[str]:
        """Fetch the names that are admitted, wait for them and return them."""
        waiting = set()
        admitted = []
        deadline = time.monotonic() + WITHIN_S
        for name in names:
            want = Want(size_bytes)
            if not self.fetcher.has_room({name: want}):
                break
            admitted.append(name)
            if self.fetcher.acquire(name, want) is FetchState.PENDING:
                waiting.add(name)
            waiting -= self.look()
        while waiting:
            assert time.monotonic() < deadline
            waiting -= self.look()
            time.sleep(0.001)
        return admitted


@pytest.mark.parametrize(("first", "then"), [(8 * MIB, 4 * MIB), (4 * MIB, 6 * MIB)])
def test_budget_holds_for_entries_of_two_sizes(tmp_path: Path, first: int, then: int) -> None:
    """Kept entries are evicted for entries of another size; their larger buffers are not reused."""
    budget = 128 * MIB
    with open_store(f"file://{tmp_path}/store") as store:
        assert isinstance(store, SharedDiskStore)
        watched = Watched(store, budget, (first, then))
        kept = watched.fetch([f"0-{n}" for n in range(budget // first - 1)], first)
        for name in kept:
            watched.fetcher.release(name)
        pinned = watched.fetch([f"1-{n}" for n in range(32)], then)
        watched.fetcher.close()

    assert len(kept) == budget // first - 1
    assert len(pinned) == min(32, budget // (then + 2048))
    assert watched.pinned_bytes <= watched.counted_bytes <= budget
    assert watched.mapped_bytes <= 1.1 * budget


@pytest.mark.parametrize("below", [OVERHEAD_BYTES + 2, 256, 2, 0])
def test_reservation_covers_an_entry_about_as_large_as_a_page(tmp_path: Path, below: int) -> None:
    """The header alone may make the entry a large one."""
    size = LARGE_BYTES - below
    with open_store(f"file://{tmp_path}/store") as store:
        store.put(EntryKey("ns", "a"), entry(shape=(size // 2,)))
        found = store.get(EntryKey("ns", "a"))

    assert found is not None
    assert entry_bytes(found) <= buffer_bytes(size) + OVERHEAD_BYTES
