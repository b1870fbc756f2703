"""Entries and folders that are damaged, foreign, or links: each is a miss, and is removed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ec_store import Entry, StoreUnavailable
from ec_store.disk.store import SharedDiskStore
from ec_store.testing.stores import assert_same, entry, key, sized
from tests.ec_store.disk.on_disk import opened, path_of


@pytest.mark.fault(20)
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.changes_files
def test_every_flipped_byte_is_a_miss_and_removed(root: Path, large: bool) -> None:
    kept = sized(2**20 if large else 64)
    with opened(root) as store:
        store.put(key(), kept)
        path = path_of(root, key())
        whole = path.read_bytes()
        # Every byte of a small entry; of a large one, the header's and some of the payload's.
        places = range(len(whole)) if not large else [*range(0, 500, 50), *range(500, 2**20, 10**5)]
        for seen, place in enumerate(places, 1):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << place % 8
            path.write_bytes(flipped)

            assert store.get(key()) is None
            assert not path.exists()
            assert store.stats().corrupt == seen
        path.write_bytes(whole)
        assert_same(kept, store.get(key()))


@pytest.mark.fault(20)
@pytest.mark.fault(24)
@pytest.mark.changes_files
def test_a_truncated_entry_is_a_miss_and_removed(root: Path, store: SharedDiskStore) -> None:
    store.put(key(), sized(64))
    path = path_of(root, key())
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        found = store.get(key()) if length % 2 else store.lookup([key()])[0]

        assert found is None
        assert not path.exists()
    path.write_bytes(whole + b"x")
    assert store.get(key()) is None
    assert store.stats().corrupt == len(whole) + 1


@pytest.mark.fault(20)
@pytest.mark.changes_files
def test_an_entry_under_the_wrong_name_is_corrupt(root: Path, store: SharedDiskStore) -> None:
    store.put(key("a"), entry())
    path_of(root, key("b")).parent.mkdir(parents=True)
    shutil.copy(path_of(root, key("a")), path_of(root, key("b")))

    assert [row.digest for row in store.verify() if row.problem] == [key("b").digest]
    assert store.get(key("b")) is None
    assert store.stats().corrupt == 1


@pytest.mark.parametrize("size", [2**20, 3 * 2**20 + 2, 5 * 2**20 - 2])
def test_every_piece_of_a_large_entry_is_in_its_place_and_checked(
    root: Path, store: SharedDiskStore, size: int
) -> None:
    kept = Entry(memoryview(os.urandom(size)), "BF16", (size // 2,), "image")
    store.put(key(), kept)
    for place in range(1, size, 2**19 - 1):
        assert_same(kept, store.get(key()))
        with path_of(root, key()).open("r+b") as file:
            file.seek(-place, os.SEEK_END)
            [byte] = file.read(1)
            file.seek(-place, os.SEEK_END)
            file.write(bytes([byte ^ 1]))

        assert store.get(key()) is None
        assert store.put(key(), kept) is True


@pytest.mark.fault(20)
@pytest.mark.changes_files
def test_a_file_truncated_while_it_is_read_is_a_miss(
    root: Path, store: SharedDiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(key(), sized(8 * 2**20, 5))
    path, preadv = path_of(root, key()), os.preadv

    def cutting(fd: int, into: list[memoryview], offset: int) -> int:
        if offset > 2**20:
            os.truncate(path, offset)
        return preadv(fd, into, offset)

    monkeypatch.setattr(os, "preadv", cutting)

    assert store.get(key()) is None
    assert store.stats().corrupt == 1


@pytest.mark.fault(29)
@pytest.mark.changes_files
def test_a_read_entry_survives_the_truncation_of_its_file(
    root: Path, store: SharedDiskStore
) -> None:
    store.put(key(), sized(8 * 2**20, 5))
    found = store.get(key())
    os.truncate(path_of(root, key()), 0)

    assert_same(sized(8 * 2**20, 5), found)


def test_memory_is_used_again_only_when_nothing_refers_to_it(store: SharedDiskStore) -> None:
    size = 2**21
    for n in range(4):
        store.put(key(str(n)), sized(size, n))
    first = store.get(key("0"))
    assert first is not None
    numpy = pytest.importorskip("numpy")
    part = numpy.frombuffer(first.data, numpy.uint8)[10:20]
    kept = bytes(part)
    del first
    others = [store.get(key(str(n))) for n in (1, 2, 3)]

    assert bytes(part) == kept
    for n, other in enumerate(others, 1):
        assert_same(sized(size, n), other)


@pytest.mark.security("S14")
@pytest.mark.changes_files
def test_a_link_in_place_of_an_entry_is_not_followed(
    root: Path, store: SharedDiskStore, tmp_path: Path
) -> None:
    store.put(key(), entry())
    path = path_of(root, key())
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)

    assert list(store.ls()) == []
    assert store.get(key()) is None
    assert store.put(key(), sized(10, 1)) is True
    assert_same(sized(10, 1), store.get(key()))
    assert elsewhere.exists()


@pytest.mark.security("S14")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.changes_files
def test_a_link_in_place_of_a_folder_is_not_followed(
    root: Path, store: SharedDiskStore, tmp_path: Path, depth: int
) -> None:
    store.put(key(), entry())
    folder = path_of(root, key()).parents[depth]
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    before = sorted(path.name for path in (tmp_path / "elsewhere").rglob("*"))

    assert store.get(key()) is None
    assert store.lookup([key()]) == [None]
    assert store.lease([key()], 5) == [None]
    with pytest.raises(StoreUnavailable):
        store.put(key(), entry())
    assert sorted(path.name for path in (tmp_path / "elsewhere").rglob("*")) == before


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.changes_files
def test_an_entry_that_is_not_a_file_is_a_miss_and_is_removed(
    root: Path, store: SharedDiskStore, make: Callable[[Path], None]
) -> None:
    store.put(key(), entry())
    path_of(root, key()).unlink()
    make(path_of(root, key()))

    assert store.get(key()) is None
    assert store.put(key(), entry()) is True
    assert_same(entry(), store.get(key()))
