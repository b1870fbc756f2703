"""Folders of entries: they are removed when they are empty, and created again."""

from pathlib import Path

import pytest

from ec_store.disk import tree
from ec_store.disk.files import Folder
from ec_store.disk.store import SharedDiskStore
from ec_store.testing.stores import assert_same, key, sized
from tests.ec_store.disk.on_disk import counted, opened, path_of


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


def test_an_entry_in_a_folder_that_was_removed_as_empty_is_found_at_once(root: Path) -> None:
    store = opened(root, look_every_s=3600)
    store.put(key(), sized(100, 1))
    assert store.get(key()) is not None
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
    publish, left = Folder.publish, [races]

    def late(folder: Folder, fd: int, name: str) -> bool:
        if name == key().digest and left[0]:
            left[0] -= 1
            path_of(root, key()).parent.rmdir()
        return publish(folder, fd, name)

    monkeypatch.setattr(Folder, "publish", late)

    assert store.put(key(), sized(100)) is True
    assert left == [0]
    assert store.get(key()) is not None
    assert store.stats().entries == 1
