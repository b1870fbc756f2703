"""Store on a file system with failing calls: ESTALE, EIO or EDQUOT."""

import errno
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ec_store import StoreUnavailable
from ec_store.disk.eviction_policy import BLOCK_BYTES
from ec_store.disk.files import Folder
from ec_store.disk.store import SharedDiskStore
from ec_store.testing.stores import assert_same, entry, key, sized
from tests.ec_store.disk.on_disk import age, entries_bytes, files, opened, path_of

LENGTH = 2000
READING = ("open", "stat", "fstat", "read", "pread", "scandir", "preadv")
WRITING = ("pwritev", "write", "pwrite", "rename", "link", "unlink", "mkdir", "utime", "fchmod")

CALLS: dict[str, Callable[[SharedDiskStore], Any]] = {
    "get": lambda store: store.get(key("kept")),
    "get, large": lambda store: store.get(key("large")),
    "get, missing": lambda store: store.get(key("none")),
    "lookup": lambda store: store.lookup([key("kept"), key("none")]),
    "lease": lambda store: store.lease([key("kept")], 60),
    "put": lambda store: store.put(key("new"), sized(LENGTH, 2)),
    "put, large": lambda store: store.put(key("new"), sized(2**20 + 2, 2)),
    "put, there": lambda store: store.put(key("kept"), sized(LENGTH, 1)),
    "delete": lambda store: store.delete([key("gone")]),
    "purge": lambda store: store.purge("other"),
    "ls": lambda store: list(store.ls()),
    "verify": lambda store: list(store.verify()),
    "evict": lambda store: store.evict(),
    "stats": lambda store: store.stats(),
    "register": lambda store: store.register_namespace("m", "n"),
    "namespaces": lambda store: store.namespaces(),
}


@contextmanager
def failing(name: str, first: int, last: int, code: int) -> Iterator[list[int]]:
    """Let calls `first` to `last` of a function of `os` fail; yield the number of calls."""
    real, calls = getattr(os, name), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if first <= calls[0] <= last:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    setattr(os, name, call)
    try:
        yield calls
    finally:
        setattr(os, name, real)


def staging(root: Path) -> list[Path]:
    return list((root / "entries").rglob("*.tmp"))


def check(root: Path, store: SharedDiskStore, name: str) -> None:
    """Check that the store works without being reopened, and has not lost or leaked anything."""
    assert_same(sized(LENGTH, 1), store.get(key("kept")))
    found = store.get(key("new"))
    assert found is None or found.data in {
        sized(length, 2).data.tobytes() for length in (LENGTH, 2**20 + 2)
    }
    assert name == "unlink" or not staging(root)
    assert (store.stats().bytes or 0) >= entries_bytes(root)
    assert store.stats().corrupt == 0
    store.delete([key("new")])
    assert store.put(key("new"), sized(10)) is True
    store.delete([key("new")])


@pytest.mark.fault(17)
@pytest.mark.fault(25)
@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EDQUOT], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", [*READING, *WRITING])
def test_whichever_call_fails_is_a_miss_or_unavailable_and_leaves_nothing(
    tmp_path: Path, name: str, code: int
) -> None:
    root = tmp_path / "store"
    with opened(root) as store:
        store.put(key("kept"), sized(LENGTH, 1))
        store.put(key("large"), sized(2**20 + 2, 1))
        for what, call in CALLS.items():
            failed, first = True, 0
            while failed and first < 40:
                first += 1
                for last in (first, 10_000):
                    store.put(key("gone"), sized(10))
                    with failing(name, first, last, code) as calls:
                        try:
                            call(store)
                        except StoreUnavailable as error:
                            assert what not in {"get", "get, large", "lookup", "lease"}, error
                    failed = calls[0] >= first
                    check(root, store, name)


@pytest.mark.fault(25)
def test_an_entry_with_a_stale_handle_is_a_miss_and_not_corrupt(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with opened(root) as store:
        store.put(key(), sized(LENGTH))
        with failing("pread", 1, 10_000, errno.ESTALE):
            assert list(store.verify(fix=True)) == []

        assert store.get(key()) is not None


def make_unreadable(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    real = os.open

    def open_other(path: str, *args: Any, **kwargs: Any) -> int:
        if path == name:
            raise OSError(code, os.strerror(code))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_other)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.EMFILE])
def test_listing_ends_with_the_error_of_an_entry_that_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    with opened(tmp_path / "store") as store:
        store.put(key("a"), sized(LENGTH))
        store.put(key("b"), sized(LENGTH))
        make_unreadable(monkeypatch, key("a").digest, code)
        for call in (store.ls, store.verify):
            rows = call()
            assert next(rows).digest == key("b").digest
            with pytest.raises(StoreUnavailable):
                next(rows)


def test_purge_removes_what_it_can_before_it_reports_an_unreadable_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "store") as store:
        store.put(key("a"), sized(LENGTH))
        store.put(key("b"), sized(LENGTH))
        store.register_namespace("served", "model")
        store.register_namespace("another", "other")
        with monkeypatch.context() as patch:
            make_unreadable(patch, key("a").digest, errno.EIO)
            with pytest.raises(StoreUnavailable):
                store.purge("model")

        assert [row.digest for row in store.ls()] == [key("a").digest]
        assert store.namespaces() == {"another": "other"}


@pytest.fixture
def failing_disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[int], None]]]:
    """Yield a disk of 16 MiB and a function that cuts it; reads beyond the cut fail."""
    image, mount = tmp_path / "image", tmp_path / "disk"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(2**24)
    made = subprocess.run(
        ["/usr/sbin/mkfs.ext4", "-q", "-F", "-b", "4096", "-O", "^has_journal", str(image)],
        check=False,
        capture_output=True,
    )
    mounted = not os.geteuid() and not made.returncode and not subprocess.run(
        ["/bin/mount", "-o", "loop,errors=continue", str(image), str(mount)],
        check=False,
        capture_output=True,
    ).returncode  # fmt: skip
    if not mounted:
        pytest.skip("needs to mount a file system in a file")

    def cut(size: int) -> None:
        subprocess.run(["/bin/sync", "-f", str(mount)], check=False)
        os.truncate(image, size)
        Path("/proc/sys/vm/drop_caches").write_text("1")

    yield mount, cut
    subprocess.run(["/bin/umount", "-l", str(mount)], check=True)


@pytest.mark.fault(17)
def test_failing_disk_serves_readable_entries_and_misses_the_rest(
    failing_disk: tuple[Path, Callable[[int], None]],
) -> None:
    mount, cut = failing_disk
    with SharedDiskStore.from_url(f"{(mount / 'store').as_uri()}?max_share=1") as store:
        store.put(key("small"), sized(LENGTH, 1))
        store.put(key("large"), sized(12 * 2**20))
        cut(2**23)

        assert store.get(key("large")) is None
        assert_same(sized(LENGTH, 1), store.get(key("small")))
        assert store.stats().corrupt == 0
        with pytest.raises(StoreUnavailable, match="Input/output error"):
            list(store.verify(fix=True))
        cut(2**16)
        with pytest.raises(StoreUnavailable):
            store.put(key("new"), sized(2**20))


@pytest.mark.fault(17)
def test_a_write_that_fails_leaves_nothing(root: Path, store: SharedDiskStore) -> None:
    store.put(key("kept"), sized(1000))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(StoreUnavailable):
            store.put(key(), sized(200_000))
        with pytest.raises(StoreUnavailable):
            store.put(key(), sized(2**21))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)

    assert files(root, "entries") == [path_of(root, key("kept"))]
    assert store.stats().bytes == entries_bytes(root)


def test_close_that_fails_after_a_read_changes_nothing(
    store: SharedDiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(key(), entry())
    close = os.close

    def failing(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
        close(fd)
        if "entries" in path and path.endswith(key().digest):
            raise OSError(errno.EIO, "the close failed")

    monkeypatch.setattr(os, "close", failing)

    assert_same(entry(), store.get(key()))
    assert store.lookup([key()])[0] is not None
    assert store.lease([key()], 5)[0] is not None


pytestmark = pytest.mark.fault(92)


def test_eviction_ends_if_others_free_the_space_meanwhile(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(root) as store, opened(root) as other:
        for n in range(200):
            store.put(key(str(n)), sized(100))
        store.configure(max_bytes=100 * BLOCK_BYTES)
        remove = Folder.remove_folder

        def others_remove(folder: Folder, name: str) -> bool:
            monkeypatch.undo()
            assert other.delete([key(str(n)) for n in range(120)]) >= 100
            return remove(folder, name)

        monkeypatch.setattr(Folder, "remove_folder", others_remove)

        assert store.evict() <= 16


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
@pytest.mark.parametrize("number", [1, 10**9])
def test_listings_that_fail_are_the_error_and_not_a_full_store(
    root: Path, monkeypatch: pytest.MonkeyPatch, code: int, number: int
) -> None:
    with full_store(root) as store:
        with monkeypatch.context() as patched:
            failing_listings(patched, root, code, number)
            with pytest.raises(StoreUnavailable, match=os.strerror(code)):
                store.put(key("new"), sized(100))
        # No second passes, in which a full store would drop entries without another check.
        assert store.put(key("new"), sized(100)) is True
        assert store.stats().drops == 1
        assert store.stats().bytes == entries_bytes(root)
