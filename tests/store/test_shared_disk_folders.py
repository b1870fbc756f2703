"""Folders that a shared directory keeps open: to look entries up, and not to write them."""

import gc
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ec_store import EntryKey, shared_disk, tree
from ec_store.shared_disk import SharedDiskStore
from tests.store.contract import assert_same, key, sized

FORK = multiprocessing.get_context("fork")
SOON_S = 0.05


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> Iterator[SharedDiskStore]:
    with opened(root) as store:
        yield store


@pytest.fixture
def looks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_disk, "LOOK_EVERY_S", SOON_S)


def opened(root: Path) -> SharedDiskStore:
    return SharedDiskStore.from_url(root.as_uri())


FOLDERS = {"entries/ab/cd": 0, "entries/ab": 1}
levels = pytest.mark.parametrize("depth", FOLDERS.values(), ids=FOLDERS.keys())


def path_of(root: Path, kept: EntryKey) -> Path:
    return root / "entries" / kept.digest[:2] / kept.digest[2:4] / kept.digest


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@levels
def test_what_another_puts_into_a_folder_made_again_is_found(
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
def test_what_one_puts_into_a_folder_made_again_is_found_at_once(
    root: Path, store: SharedDiskStore, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    monkeypatch.setattr(shared_disk, "LOOK_EVERY_S", 3600.0)
    store.put(key(), sized(10, 1))
    assert store.get(key()) is not None
    shutil.rmtree(path_of(root, key()).parents[depth])

    assert store.put(key(), sized(10, 2)) is True
    assert_same(sized(10, 2), store.get(key()))


@levels
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


def test_folders_kept_open_are_few_and_closed_with_the_store(root: Path) -> None:
    keys = [key(str(number)) for number in range(2 * tree.KEPT_FOLDERS)]
    with opened(root) as writer:
        for one in keys:
            writer.put(one, sized(2))
    gc.collect()  # what other tests have left open is closed now, and not in between
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


def test_threads_lose_no_folder_that_is_kept_no_more(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "KEPT_FOLDERS", 20)
    monkeypatch.setattr(shared_disk, "LOOK_EVERY_S", 0.0)
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
