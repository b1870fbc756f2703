"""Folders that a store on a shared directory keeps open for lookups, but not for writes."""

import gc
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ec_store import EntryKey
from ec_store.disk import opening, tree
from ec_store.disk.files import Folder
from ec_store.disk.store import SharedDiskStore
from tests.ec_store.contract import assert_same, key, sized
from tests.ec_store.disk.on_disk import counted

FORK = multiprocessing.get_context("fork")
SOON_S = 0.05


@pytest.fixture
def store(root: Path) -> Iterator[SharedDiskStore]:
    with opened(root) as store:
        yield store


@pytest.fixture
def looks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "LOOK_EVERY_S", SOON_S)


def opened(root: Path) -> SharedDiskStore:
    return SharedDiskStore.from_url(root.as_uri())


FOLDERS = {"entries/ab/cd": 0, "entries/ab": 1}
levels = pytest.mark.parametrize("depth", FOLDERS.values(), ids=FOLDERS.keys())


def path_of(root: Path, kept: EntryKey) -> Path:
    return root / "entries" / kept.digest[:2] / kept.digest[2:4] / kept.digest


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@levels
@pytest.mark.changes_files
def test_an_entry_of_another_process_in_a_recreated_folder_is_found(
    root: Path, store: SharedDiskStore, looks_soon: None, depth: int
) -> None:
    store.put(key(), sized(10, 1))
    assert store.get(key()) is not None
    shutil.rmtree(path_of(root, key()).parents[depth])
    assert store.get(key()) is None
    with opened(root) as other:
        other.put(key(), sized(10, 2))
    time.sleep(2 * SOON_S)

    assert_same(sized(10, 2), store.get(key()))


@levels
@pytest.mark.changes_files
def test_an_own_entry_in_a_recreated_folder_is_found_at_once(
    root: Path, store: SharedDiskStore, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    monkeypatch.setattr(opening, "LOOK_EVERY_S", 3600.0)
    store.put(key(), sized(10, 1))
    assert store.get(key()) is not None
    shutil.rmtree(path_of(root, key()).parents[depth])

    assert store.put(key(), sized(10, 2)) is True
    assert_same(sized(10, 2), store.get(key()))


@levels
@pytest.mark.changes_files
def test_a_folder_that_became_a_link_is_not_followed(
    root: Path, store: SharedDiskStore, looks_soon: None, tmp_path: Path, depth: int
) -> None:
    store.put(key(), sized(10, 1))
    assert store.get(key()) is not None
    folder, elsewhere = path_of(root, key()).parents[depth], tmp_path / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    time.sleep(2 * SOON_S)

    assert store.get(key()) is None


def test_folders_kept_open_are_few_and_closed_with_the_store(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each check of the path closes them, and looking up all keys may take longer than a second.
    monkeypatch.setattr(opening, "LOOK_EVERY_S", 3600.0)
    keys = [key(str(number)) for number in range(2 * tree.KEPT_FOLDERS)]
    with opened(root) as writer:
        for one in keys:
            writer.put(one, sized(2))
    gc.collect()  # closes what other tests have left open now, not later
    before = descriptors()
    with opened(root) as store:
        start = descriptors()
        assert None not in store.lookup(keys)

        assert tree.KEPT_FOLDERS // 2 < descriptors() - start <= tree.KEPT_FOLDERS
    assert descriptors() == before


def test_a_fork_uses_folders_that_its_parent_keeps_open(store: SharedDiskStore) -> None:
    keys = [key(str(number)) for number in range(20)]
    for one in keys:
        store.put(one, sized(2))
    assert None not in store.lookup(keys)

    def child() -> None:
        found = store.lookup(keys)
        store.close()
        os._exit(None in found)

    process = FORK.Process(target=child)
    process.start()
    process.join()

    assert process.exitcode == 0
    assert None not in store.lookup(keys)


def test_threads_can_use_a_folder_that_was_dropped_from_the_cache(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "KEPT_FOLDERS", 20)
    monkeypatch.setattr(opening, "LOOK_EVERY_S", 0.0)
    keys = [key(str(number)) for number in range(50)]
    until_s = time.monotonic() + 1.0
    with opened(root) as store:
        for one in keys:
            store.put(one, sized(2))

        def misses(turn: int) -> int:
            count = 0
            while time.monotonic() < until_s:
                count += store.lookup(keys[turn:] + keys[:turn]).count(None)
            return count

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(misses, range(8))) == 0
        assert store.stats().corrupt == 0


# Removal of empty folders


def leaves(root: Path) -> list[Path]:
    return list((root / "entries").glob("??/??"))


def make_leaves(root: Path, number: int) -> None:
    for n in range(number):
        (root / "entries" / f"{n >> 8:02x}" / f"{n & 255:02x}").mkdir(parents=True, exist_ok=True)


def full_of_twenty(root: Path) -> SharedDiskStore:
    store = SharedDiskStore.from_url(f"{root.as_uri()}?max_bytes={20 * 4096}")
    for n in range(20):
        store.put(key(str(n)), sized(100))
    return store


@pytest.mark.parametrize("empty", [0, 5000])
def test_an_eviction_costs_the_same_after_folders_were_left_empty(root: Path, empty: int) -> None:
    """An eviction must not pay for each folder that once existed."""
    with full_of_twenty(root) as store:
        make_leaves(root, empty)
        with counted() as once:
            for n in range(30):  # each finds some of them
                store.put(key(f"finds some {n}"), sized(100))
        with counted() as counts:
            for n in range(8):
                store.put(key(f"next {n}"), sized(100))

    assert once["scandir"] <= empty + 30 * 60
    assert counts["scandir"] <= 8 * 60
    assert len(leaves(root)) <= 20


def test_a_full_store_has_at_most_one_folder_per_entry(root: Path) -> None:
    with full_of_twenty(root) as store:
        for n in range(200):
            store.put(key(f"next {n}"), sized(100))

    assert len(leaves(root)) <= 20


@pytest.mark.changes_files
def test_a_sweep_removes_empty_folders_and_no_others(root: Path, store: SharedDiskStore) -> None:
    store.put(key(), sized(100))
    make_leaves(root, 300)
    (root / "entries" / "00" / "00" / "somebody's").write_bytes(b"")
    store.sweep()

    assert set(leaves(root)) == {path_of(root, key()).parent, root / "entries" / "00" / "00"}


def test_an_entry_in_a_folder_that_was_removed_as_empty_is_found_at_once(
    root: Path, store: SharedDiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "LOOK_EVERY_S", 3600.0)
    store.put(key(), sized(100, 1))
    assert store.get(key()) is not None  # its folder is kept open
    with opened(root) as other:
        other.delete([key()])
        other.sweep()
        assert leaves(root) == []
        other.put(key(), sized(100, 2))

    assert_same(sized(100, 2), store.get(key()))


@pytest.mark.parametrize("races", [1, tree.RACES])
def test_a_writer_makes_its_folder_again_that_an_eviction_removed(
    root: Path, store: SharedDiskStore, monkeypatch: pytest.MonkeyPatch, races: int
) -> None:
    create, left = Folder.create, [races]

    def late(folder: Folder, name: str) -> int:
        if key().digest in name and left[0]:
            left[0] -= 1
            path_of(root, key()).parent.rmdir()
        return create(folder, name)

    monkeypatch.setattr(Folder, "create", late)

    assert store.put(key(), sized(100)) is True
    assert left == [0]
    assert store.get(key()) is not None
    assert store.stats().entries == 1
