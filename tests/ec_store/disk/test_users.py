"""Two users of one group on a shared directory, and on each other's private directories."""

import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from ec_store import StoreUnavailable
from ec_store.disk.store import SharedDiskStore
from ec_store.testing.stores import assert_same, key, sized
from tests.ec_store.children import ended, start

GROUP = 54320
USERS = (54321, 54322)
SHARED = "dir_mode=2770"
SHARED_DIRECTORY = 0o2770


@pytest.fixture
def root() -> Iterator[Path]:
    if os.geteuid():
        pytest.skip("only root may run code as two users")
    parent = Path(tempfile.mkdtemp(dir="/dev/shm"))
    parent.chmod(0o755)
    root = parent / "store"
    root.mkdir()
    os.chown(root, USERS[0], GROUP)
    root.chmod(SHARED_DIRECTORY)  # as docs/configuration/store.md recommends
    # Import everything now: after `setuid`, the process may not be able to read root's Python.
    with opened(parent / "warm") as store:
        store.put(key(), sized(2**20 + 2))
        store.get(key())
        store.evict()
    yield root
    shutil.rmtree(parent)


def opened(root: Path, query: str = SHARED) -> SharedDiskStore:
    return SharedDiskStore.from_url(f"{root.as_uri()}?{query}")


def by(user: int, call: Callable[[], object], groups: tuple[int, ...] = (GROUP,)) -> None:
    assert ended(start(call, user, groups)) == 0


def test_users_of_a_group_use_each_others_entries(root: Path) -> None:
    def put() -> None:
        with opened(root) as store:
            for name in "abcd":
                assert store.put(key(name), sized(2**20 + 2, ord(name)))
            store.register_namespace("m", "first")
            store.lease([key("a")], 600)

    def use() -> None:
        with opened(root) as store:
            for name in "abcd":
                assert_same(sized(2**20 + 2, ord(name)), store.get(key(name)))
                assert store.put(key(name), sized(10)) is False
            assert all(store.lease([key("a"), key("b")], 600))
            assert store.delete([key("c")]) == 1
            store.register_namespace("m", "second")
            assert store.namespaces() == {"m": "second"}
            old = root / "entries" / key("d").digest[:2] / key("d").digest[2:4] / key("d").digest
            assert old.stat().st_uid == USERS[0]

    def evict() -> None:
        with opened(root) as store:
            store.configure(max_bytes=2**20)
            assert store.evict() == 1
            assert [bool(info) for info in store.lookup([key(n) for n in "abcd"])] == [
                True,
                True,
                False,
                False,
            ]
            assert [row.problem for row in store.verify()] == [None, None]

    by(USERS[0], put)
    by(USERS[1], use)
    by(USERS[1], evict)


def test_a_file_damaged_by_one_user_is_removed_by_another(root: Path) -> None:
    def spoil() -> None:
        path = root / "entries" / key().digest[:2] / key().digest[2:4] / key().digest
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)

    def find() -> None:
        with opened(root) as store:
            assert store.get(key()) is None
            assert store.stats().corrupt == 1
            assert store.put(key(), sized(100, 2)) is True

    by(USERS[0], lambda: opened(root).put(key(), sized(100, 1)))
    by(USERS[1], spoil)
    by(USERS[1], find)
    by(USERS[0], lambda: assert_same(sized(100, 2), opened(root).get(key())))


def test_users_at_once_fill_and_evict_one_store(root: Path) -> None:
    """Each user creates folders, leases and ledger lines while the other needs them."""

    def work(seed: int) -> None:
        with opened(root, f"{SHARED}&max_bytes=512KiB") as store:
            started.wait()
            for n in range(400):
                with suppress(StoreUnavailable):  # a folder that has not got its permissions yet
                    store.put(key(str(n)), sized(4000, n))
                found = store.get(key(str(n - seed)))
                assert found is None or found.data == sized(4000, n - seed).data
                if n % 20 == seed:
                    store.lease([key(str(n - 3))], 0.05)
                if n % 5 == seed:
                    with suppress(StoreUnavailable):
                        store.delete([key(str(n - 2))])
            assert store.stats().drops < 40
            assert store.stats().corrupt == 0

    started = multiprocessing.get_context("fork").Barrier(4)
    children = [start(partial(work, n), USERS[n % 2], (GROUP,)) for n in range(4)]

    assert [ended(child) for child in children] == [0] * 4


def test_put_uses_an_empty_folder_that_another_user_created_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evictor removes the folder between its creation and the setting of its permissions."""
    name = key().digest[:2]

    def put() -> None:
        def mkdir(path: str, mode: int, *, dir_fd: int) -> None:
            make(path, mode, dir_fd=dir_fd)
            if path == name:
                os.rmdir(path, dir_fd=dir_fd)
                removed.wait()
                created.wait()

        with opened(root) as store:
            make = os.mkdir
            monkeypatch.setattr(os, "mkdir", mkdir)
            assert store.put(key(), sized(10)) is True
            assert store.stats().drops == 0

    def create() -> None:
        removed.wait()
        folder = root / "entries" / name
        folder.mkdir()
        folder.chmod(SHARED_DIRECTORY)
        created.wait()

    context = multiprocessing.get_context("fork")
    removed, created = context.Barrier(2), context.Barrier(2)
    by(USERS[0], lambda: opened(root).stats())
    children = [start(put, USERS[0], (GROUP,)), start(create, USERS[1], (GROUP,))]

    assert [ended(child) for child in children] == [0, 0]


@pytest.mark.fault(26)
def test_open_fails_for_a_private_store_of_another_user(root: Path) -> None:
    private = root.parent / "private"

    def refused() -> None:
        with pytest.raises(StoreUnavailable, match=r"Permission denied.*dir_mode=2770"):
            opened(private, "")

    private.mkdir()
    os.chown(private, USERS[0], GROUP)
    private.chmod(0o750)
    by(USERS[0], lambda: opened(private, "").put(key(), sized(10)))
    by(USERS[1], refused)
    by(USERS[1], refused, ())


@pytest.mark.fault(26)
def test_an_entry_that_becomes_private_is_a_miss(root: Path) -> None:
    """A user removes the group's permissions."""

    def put_private() -> None:
        with opened(root) as store:
            store.put(key("theirs"), sized(100))
        folder = root / "entries" / key("theirs").digest[:2]
        folder.chmod(0o700)

    def use() -> None:
        with opened(root) as store:
            assert store.get(key("theirs")) is None
            assert store.lookup([key("theirs")]) == [None]
            assert store.lease([key("theirs")], 5) == [None]
            with pytest.raises(StoreUnavailable, match="Permission denied"):
                store.put(key("theirs"), sized(100))
            with pytest.raises(StoreUnavailable, match="Permission denied"):
                store.delete([key("theirs")])
            assert store.put(key("ours"), sized(100)) is True
            assert store.get(key("ours")) is not None

    by(USERS[0], lambda: opened(root).close())
    by(USERS[0], put_private)
    by(USERS[1], use)
