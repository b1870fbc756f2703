"""Stores on small file systems, and the space that they leave to others."""

import mmap
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ec_store import Entry, EntryTooLarge, StoreUnavailable
from ec_store.testing.stores import key, sized
from tests.ec_store.disk.on_disk import (
    opened,
)
from tests.small_disk import small_disk

FORK = multiprocessing.get_context("fork")


BLOCK = 4096


def test_quota_counts_blocks(root: Path) -> None:
    """Entries without a tensor have names that clients choose; only the quota limits them."""
    with opened(root, f"max_bytes={20 * BLOCK}") as store:
        for n in range(50):
            store.put(key(str(n)), Entry(memoryview(b""), "BF16", (0,), "image"))

        assert (store.stats().entries or 0) <= 20
        assert (store.stats().bytes or 0) <= 20 * BLOCK


def touch_shared_memory(path: Path, size: int, go: Any) -> None:
    """Touch memory as vLLM's queues do: the size is set first, the pages are touched much later."""
    with path.open("w+b") as file:
        file.truncate(size)
        memory = mmap.mmap(file.fileno(), size)
        go.wait()
        for place in range(0, size, BLOCK):
            memory[place] = 1


@pytest.mark.fault(17)
def test_process_with_shared_memory_beside_the_store_gets_no_sigbus(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "32m") as disk:
        go = FORK.Event()
        sizes = {"small": 2**20, "large": 14 * 2**20}
        beside = [
            FORK.Process(target=touch_shared_memory, args=(disk.path / name, size, go))
            for name, size in sizes.items()
        ]
        for process in beside:
            process.start()
        with opened(disk.path / "store") as store:
            for n in range(60):
                store.put(key(str(n)), sized(2**20))
            stats = store.stats()
        go.set()
        for process in beside:
            process.join()

    assert [process.exitcode for process in beside] == [0, 0], signal.SIGBUS
    assert stats.max_bytes == 16 * 2**20
    assert stats.drops == 0
    assert 10 <= (stats.entries or 0) <= 15


def test_share_of_the_file_system_may_be_chosen(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", "8m") as disk,
        opened(disk.path / "store", "max_share=0.25") as store,
    ):
        assert store.stats().max_bytes == 2 * 2**20
        with pytest.raises(EntryTooLarge):
            store.put(key(), sized(2 * 2**20))
        assert store.stats().entries == 0


def test_reserve_is_restored_before_writing_or_a_warning_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vllm.ec_store")
    with small_disk(tmp_path / "disk", "20m") as disk, opened(disk.path / "store") as store:
        for n in range(9):
            store.put(key(str(n)), sized(2**20 - 2**14))
        free = 3 * 2**20 + 2**19
        others = os.statvfs(disk.path)
        (disk.path / "others").write_bytes(bytes(others.f_bavail * others.f_frsize - free))
        for n in range(9, 30):
            store.put(key(str(n)), sized(2**20 - 2**14))
            left = os.statvfs(disk.path)
            assert left.f_bavail * left.f_frsize >= 2**20
        assert store.stats().drops == 0
        assert store.stats().evictions >= 17

        store.lease([key(str(n)) for n in range(30)], 600)
        left = os.statvfs(disk.path)
        (disk.path / "more").write_bytes(bytes(left.f_bavail * left.f_frsize - 2**19))
        for n in range(3):
            with pytest.raises(StoreUnavailable, match="none of its entries can be evicted"):
                store.put(key(f"more-{n}"), sized(2**20))
        warned = [one for one in caplog.records if one.levelname == "WARNING"]

    assert len([one for one in caplog.records if "takes at most" in one.message]) == 1
    assert len(warned) == 1
    assert "reserved for others" in warned[0].message
