"""Eviction after a listing that skipped lines of the ledger, or that failed."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ec_store import StoreUnavailable
from ec_store.disk.config import GivenSettings
from ec_store.disk.files import Folder, Modes
from ec_store.disk.ledger import Ledger
from ec_store.disk.store import SharedDiskStore
from ec_store.disk.tree import BLOCK_BYTES
from tests.ec_store.contract import key, sized
from tests.ec_store.disk.on_disk import age, entries_bytes, files, opened, path_of

pytestmark = pytest.mark.fault(92)

GIB = 2**30


@contextmanager
def skipping(monkeypatch: pytest.MonkeyPatch, line: str, every: int, first: int) -> Iterator[None]:
    """Let each `every`th listing of the ledger from the `first` skip the line of one process."""
    names, listed = Folder.names, [0]

    def misread(folder: Folder) -> list[str]:
        found = names(folder)
        if not any(name.startswith(line) for name in found):
            return found
        listed[0] += 1
        skips = listed[0] >= first and (listed[0] - first) % every == 0
        return [name for name in found if not (skips and name.startswith(line))]

    with monkeypatch.context() as patched:
        patched.setattr(Folder, "names", misread)
        yield


def filled(root: Path, number: int) -> str:
    """Fill a store, and return the writer of the line of a process that wrote and removed much."""
    with opened(root) as store:
        for n in range(number):
            store.put(key(str(n)), sized(100))
        store.configure(GivenSettings(max_bytes=4 * number * BLOCK_BYTES))
    usage = Folder.open_path(str(root / "usage"), Modes())
    before = set(usage.names())
    cleaner, writer = Ledger(), Ledger()
    writer.charge(usage, 50 * GIB, 5000)
    cleaner.release(usage, 50 * GIB, 5000)
    [line] = [name for name in set(usage.names()) - before if name.split(".")[1] == "0"]
    return line.partition(".")[0]


@pytest.mark.parametrize("number", [60, 1300])
@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_one_misread_sum_evicts_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int, first: int
) -> None:
    line = filled(root, number)
    with opened(root) as store:
        for call in (store.evict, lambda: store.put(key(f"new-{first}"), sized(100))):
            with skipping(monkeypatch, line, 10**9, first):
                call()

        assert store.stats().evictions == store.stats().drops == 0
        assert len(files(root, "entries")) == number + 1
        assert store.stats().bytes == entries_bytes(root)


@pytest.mark.parametrize("every", [4, 5])
def test_sums_of_which_some_are_misread_evict_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    line = filled(root, 100)
    with opened(root) as store, skipping(monkeypatch, line, every, 1):
        for n in range(60):
            assert store.put(key(f"new-{n}"), sized(100)) is True
            store.evict()

    assert len(files(root, "entries")) == 160


def test_sums_that_are_all_misread_evict_at_most_a_batch_until_one_is_right(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the sample is the whole store, of which all entries may be evicted."""
    line = filled(root, 100)
    names, listed = Folder.names, [0]

    def misread_first(folder: Folder) -> list[str]:
        found = names(folder)
        if not any(name.startswith(line) for name in found):
            return found
        listed[0] += 1
        return [name for name in found if listed[0] > 2 or not name.startswith(line)]

    with opened(root) as store:
        store.stats()  # the first use also looks whether the ledger is lost
        monkeypatch.setattr(Folder, "names", misread_first)
        evicted = store.evict()

    assert 0 < evicted <= 16


def test_eviction_ends_if_others_free_the_space_meanwhile(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(root) as store, opened(root) as other:
        for n in range(200):
            store.put(key(str(n)), sized(100))
        store.configure(GivenSettings(max_bytes=100 * BLOCK_BYTES))
        remove = Folder.remove_folder

        def others_remove(folder: Folder, name: str) -> bool:
            monkeypatch.undo()
            assert other.delete([key(str(n)) for n in range(120)]) >= 100
            return remove(folder, name)

        monkeypatch.setattr(Folder, "remove_folder", others_remove)

        assert store.evict() <= 16


# Listings of entries that fail


def full_store(root: Path) -> SharedDiskStore:
    store = opened(root, f"max_bytes={20 * BLOCK_BYTES}")
    for n in range(20):
        store.put(key(str(n)), sized(100))
        age(path_of(root, key(str(n))), 100)
    return store


def failing_listings(monkeypatch: pytest.MonkeyPatch, root: Path, code: int, number: int) -> None:
    """Let the first `number` listings of the entries' top folder fail."""
    scan, failures = os.scandir, iter(range(number))
    top = (root / "entries").stat().st_ino

    def scandir(folder: Any) -> Any:
        if isinstance(folder, int) and os.fstat(folder).st_ino == top:
            for _ in failures:
                raise OSError(code, os.strerror(code))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", scandir)


CODES = pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EMFILE])


@CODES
def test_store_is_not_full_after_one_listing_that_failed(
    root: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    with full_store(root) as store:
        failing_listings(monkeypatch, root, code, 1)

        assert store.put(key("new"), sized(100)) is True
        assert store.stats().drops == 0
        assert store.stats().bytes == entries_bytes(root)


@CODES
def test_listings_that_keep_failing_are_the_error_and_not_a_full_store(
    root: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    with full_store(root) as store:
        with monkeypatch.context() as patched:
            failing_listings(patched, root, code, 10**9)
            with pytest.raises(StoreUnavailable, match=os.strerror(code)):
                store.put(key("new"), sized(100))
        # No second passes, in which a full store would drop entries without another check.
        assert store.put(key("new"), sized(100)) is True
        assert store.stats().drops == 1
        assert store.stats().bytes == entries_bytes(root)
