"""Store on a shared directory that is full, old, truncated, foreign or gone."""

import errno
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from ec_store import Entry, EntryKey, EntryTooLarge, StoreUnavailable, open_store
from ec_store.disk import housekeeping, ledger, opening
from ec_store.disk import store as disk_store
from ec_store.disk.files import Folder
from ec_store.disk.leases import SWEPT_BY_LEASES, add_lease, lease_folder, leased_digests
from ec_store.disk.lock import try_lock
from ec_store.disk.store import SharedDiskStore
from tests.ec_store.contract import another_release, assert_same, entry, key, sized
from tests.ec_store.disk.on_disk import age, entries_bytes, files, opened, path_of
from tests.examples import scaled

HOUR = 3600.0


@pytest.fixture
def store(root: Path) -> Iterator[SharedDiskStore]:
    with opened(root) as store:
        yield store


# URL


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("file:relative", "'relative' is not an absolute path"),
        ("file://", "'' is not an absolute path"),
        ("file://host/store", "'file://host/store' is not file:///path"),
        ("file:///store?ttl=0", "ttl must be greater than 0"),
        ("file:///store?max_bytes=0", "max_bytes and ttl must be greater than 0"),
        ("file:///store?max_entry_bytes=0", "max_entry_bytes must be greater than 0"),
        ("file:///store?max_share=0", "max_share must be greater than 0 and at most 1"),
        ("file:///store?max_share=1.1", "max_share must be greater than 0 and at most 1"),
        ("file:///store?max_share=half", "parameter 'max_share': could not convert"),
        ("file:///store?dir_mode=999", "parameter 'dir_mode': invalid literal"),
        ("file:///store?dir_mode=17777", "'17777' is not a mode such as 0750"),
        ("file:///store?nonsense=1", "unknown parameter 'nonsense'; known: dir_mode, max_bytes"),
        ("file:///store%00", "is not an absolute path"),
    ],
)
def test_a_wrong_url_is_refused(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        open_store(url)


@pytest.mark.security("S14")
def test_modes_do_not_depend_on_the_umask(root: Path) -> None:
    before = os.umask(0o077)
    try:
        with opened(root, "dir_mode=2770") as store:
            store.put(key(), entry())
            store.lease([key()], 5)
            store.register_namespace("m", "n")
    finally:
        os.umask(before)
    modes = {
        (path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in [root, *root.rglob("*")]
    }

    assert modes == {(True, 0o2770), (False, 0o660)}


# Corruption


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


# Links and other things where entries should be


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


# Age


def test_an_entry_that_was_not_used_for_its_ttl_is_a_miss(root: Path) -> None:
    with opened(root, "ttl=1h") as store:
        store.put(key(), sized(10, 1))
        age(path_of(root, key()), HOUR + 60)

        assert store.get(key()) is None
        assert store.lookup([key()]) == [None]
        assert store.put(key(), sized(10, 2)) is True
        assert_same(sized(10, 2), store.get(key()))


@pytest.mark.parametrize("use", ["get", "put", "lease"])
def test_using_an_entry_makes_it_young(root: Path, use: str) -> None:
    with opened(root, "ttl=1h") as store:
        store.put(key(), entry())
        age(path_of(root, key()), HOUR - 60)
        before = path_of(root, key()).stat().st_mtime
        uses: dict[str, Callable[[], object]] = {
            "get": lambda: store.get(key()),
            "put": lambda: store.put(key(), entry()),
            "lease": lambda: store.lease([key()], 5),
        }
        uses[use]()

        assert path_of(root, key()).stat().st_mtime > before + HOUR - 120


def test_lookup_does_not_mark_an_entry_as_used(root: Path, store: SharedDiskStore) -> None:
    store.put(key(), entry())
    age(path_of(root, key()), 600)
    before = path_of(root, key()).stat().st_mtime
    store.lookup([key()])

    assert path_of(root, key()).stat().st_mtime == before


def test_evict_removes_expired_entries(root: Path) -> None:
    with opened(root, "ttl=1h") as store:
        store.put(key("old"), entry())
        store.put(key("new"), entry())
        age(path_of(root, key("old")), 2 * HOUR)

        assert store.evict() == 1
        assert [row.digest for row in store.ls()] == [key("new").digest]
        assert store.stats().evictions == 1
        assert store.stats().entries == 1


def test_writers_sweep_now_and_then_without_being_asked(root: Path) -> None:
    with opened(root, "ttl=200ms") as store:
        store.put(key("old"), entry())
        time.sleep(0.5)
        store.put(key("new"), entry())

        assert not path_of(root, key("old")).exists()


@pytest.mark.fault(27)
def test_an_entry_from_the_future_is_not_kept_for_ever(root: Path, store: SharedDiskStore) -> None:
    store.put(key(), entry())
    age(path_of(root, key()), -1000 * HOUR)

    assert store.evict() == 1


# Quota


def test_the_least_recently_used_make_room(root: Path) -> None:
    with opened(root, "max_bytes=120KiB") as store:
        for n in range(9):
            store.put(key(str(n)), sized(10_000))
            age(path_of(root, key(str(n))), 1000 - n)
        store.get(key("0"))
        for n in range(9, 12):
            store.put(key(str(n)), sized(10_000))
        there = {n for n in range(12) if store.lookup([key(str(n))])[0]}

        assert entries_bytes(root) <= 120 * 1024
        assert {0, 9, 10, 11} <= there
        assert 1 not in there
        assert store.stats().evictions == 12 - len(there)
        assert store.stats().bytes == entries_bytes(root)


def test_an_entry_above_the_size_limit_is_rejected(root: Path) -> None:
    with opened(root, "max_bytes=10KiB") as store, pytest.raises(EntryTooLarge):
        store.put(key(), sized(20_000))
    with opened(root, "max_entry_bytes=1000") as store, pytest.raises(EntryTooLarge):
        store.put(key(), sized(2_000))
    with opened(root) as store, pytest.raises(EntryTooLarge):
        store.put(key(), entry(metadata={"long": "x" * 2**20}))


def test_a_leased_entry_survives_eviction_until_the_lease_ends(root: Path) -> None:
    with opened(root, "max_bytes=100KiB") as store:
        store.put(key("leased"), sized(10_000))
        assert store.lease([key("leased")], 2)[0] is not None
        age(path_of(root, key("leased")), 1000)
        for n in range(30):
            # Renewed each time: the writes may take longer than the lease.
            store.lease([key("leased")], 2)
            age(path_of(root, key("leased")), 1000)
            store.put(key(str(n)), sized(10_000))
        assert store.get(key("leased")) is not None
        age(path_of(root, key("leased")), 1000)
        time.sleep(3.1)
        for n in range(30, 50):
            store.put(key(str(n)), sized(10_000))

        assert store.get(key("leased")) is None


@pytest.mark.fault(95)
def test_a_store_full_of_leased_entries_takes_no_more(root: Path) -> None:
    with opened(root, "max_bytes=110KiB") as store:
        keys = [key(str(n)) for n in range(9)]
        for each in keys:
            store.put(each, sized(10_000))
        store.lease(keys, 60)

        with pytest.raises(StoreUnavailable):
            store.put(key("more"), sized(10_000))
        with pytest.raises(StoreUnavailable):
            store.put(key("more"), sized(10_000))
        assert all(store.lookup(keys))
        assert store.stats().drops == 2
        assert store.stats().leased == 9


@pytest.mark.fault(93)
def test_a_put_replaces_no_entry_of_another_format_that_its_readers_lease(root: Path) -> None:
    with opened(root) as store:
        with another_release():
            store.put(key(), sized(100))
        leases = store._opening.tree().leases  # noqa: SLF001
        add_lease(lease_folder(leases, 60, time.time()), key().digest)

        assert store.put(key(), sized(100, 2)) is False
        with another_release():
            assert_same(sized(100), store.get(key()))


@pytest.mark.fault(95)
def test_leased_entries_are_counted_once_until_their_last_lease_ends(root: Path) -> None:
    with opened(root) as store:
        for name in "abc":
            store.put(key(name), sized(100))
        assert store.stats().leased == 0
        for seconds in (1, 60, 600):
            store.lease([key("a")], seconds)
        store.lease([key("b")], 0.1)
        assert store.stats().leased == 2
        time.sleep(2.2)

        assert store.stats().leased == 1
        assert store.stats().bytes == entries_bytes(root)


def test_a_lease_that_comes_while_its_entry_is_evicted_keeps_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def lease_at_once(folder: Folder, digests: Collection[str], now_s: float) -> set[str]:
        leased = leased_digests(folder, digests, now_s)
        monkeypatch.undo()
        assert other.lease([key("leased")], 60)[0] is not None
        return leased

    with opened(root) as store, opened(root) as other:
        for name in ("leased", "old"):
            store.put(key(name), entry())
            age(path_of(root, key(name)), HOUR)
        store.configure(max_bytes=1)
        monkeypatch.setattr(housekeeping, "leased_digests", lease_at_once)

        assert store.evict() == 1
        assert_same(entry(), other.get(key("leased")))
        assert other.get(key("old")) is None
        assert store.stats().bytes == entries_bytes(root)


@pytest.fixture
def leases_are_no_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record no further uses, as within a second of the last one: an evictor sees only leases."""
    monkeypatch.setattr(disk_store, "TOUCH_EVERY_S", 1e9)


@pytest.mark.fault(29)
@pytest.mark.usefixtures("leases_are_no_uses")
def test_evictor_looks_for_leases_again_after_it_has_locked_its_victims(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lease_first(fd: int) -> bool:
        monkeypatch.setattr(housekeeping, "try_lock", try_lock)
        assert other.lease([key("leased")], 60)[0] is not None
        return try_lock(fd)

    with opened(root) as store, opened(root) as other:
        for name in ("leased", "old"):
            store.put(key(name), entry())
        store.configure(max_bytes=1)
        monkeypatch.setattr(housekeeping, "try_lock", lease_first)

        assert store.evict() == 1
        assert_same(entry(), other.get(key("leased")))
        assert other.get(key("old")) is None


@pytest.mark.fault(29)
@pytest.mark.usefixtures("leases_are_no_uses")
def test_lease_of_an_entry_that_is_evicted_meanwhile_is_a_miss(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evict_first(fd: int, *, shared: bool) -> bool:
        assert other.evict() == 1
        return try_lock(fd, shared=shared)

    with opened(root) as store, opened(root) as other:
        store.put(key(), entry())
        other.configure(max_bytes=1)
        monkeypatch.setattr(disk_store, "try_lock", evict_first)

        assert store.lease([key()], 60) == [None]
        assert store.get(key()) is None


@pytest.mark.fault(29)
@pytest.mark.usefixtures("leases_are_no_uses")
def test_entry_that_is_being_leased_is_not_evicted(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evict_before(*lease: Any) -> None:
        assert other.evict() == 0
        add_lease(*lease)

    with opened(root) as store, opened(root) as other:
        store.put(key(), entry())
        other.configure(max_bytes=1)
        monkeypatch.setattr(disk_store, "add_lease", evict_before)

        assert store.lease([key()], 60)[0] is not None
        assert store.get(key()) is not None


@pytest.mark.usefixtures("leases_are_no_uses")
def test_entry_that_is_being_evicted_is_not_leased(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = ledger.remove_locked

    def lease_before(*args: Any) -> int:
        assert other.lease([key()], 60) == [None]
        return remove(*args)

    with opened(root) as store, opened(root) as other:
        store.put(key(), entry())
        store.configure(max_bytes=1)
        monkeypatch.setattr(ledger, "remove_locked", lease_before)

        assert store.evict() == 1


def test_lease_removes_no_more_of_the_ended_ones_than_its_caller_can_wait_for(
    root: Path, store: SharedDiskStore
) -> None:
    store.put(key(), entry())
    leases = Folder.open_path(str(root / "leases"), 0o750)
    ended = [f"{n:064x}" for n in range(3 * SWEPT_BY_LEASES)]
    for then in (time.time() - 60, time.time() - 30):
        for digest in ended:
            add_lease(lease_folder(leases, 1, then), digest)
    before = len(files(root, "leases"))
    store.lease([key()], 1)

    assert len(files(root, "leases")) == before - SWEPT_BY_LEASES + 1
    store.sweep()
    assert len(files(root, "leases")) <= 1


def test_leases_that_ended_are_swept_by_the_next(root: Path, store: SharedDiskStore) -> None:
    store.put(key(), entry())
    for _ in range(4):
        store.lease([key()], 0.1)
        time.sleep(1.1)

    assert len(files(root, "leases")) <= 3


# Disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a disk of 1 MiB; only root may mount one."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["/bin/mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    if os.geteuid() or subprocess.run(command, check=False).returncode:
        pytest.skip("needs to mount a tmpfs")
    yield mount
    subprocess.run(["/bin/umount", "-l", str(mount)], check=True)


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


@pytest.mark.parametrize("looks", [False, True])
def test_a_directory_that_was_removed_is_a_miss_and_made_again(
    root: Path, store: SharedDiskStore, monkeypatch: pytest.MonkeyPatch, looks: bool
) -> None:
    store.put(key(), entry())
    shutil.rmtree(root)
    monkeypatch.setattr(opening, "LOOK_EVERY_S", 0 if looks else 1000)

    assert store.get(key()) is None
    assert store.lookup([key()]) == [None]
    assert store.lease([key()], 5) == [None]
    if looks:
        with pytest.raises(StoreUnavailable, match="entries could not be deleted"):
            store.delete([key()])
    else:
        assert store.delete([key()]) == 0
    assert store.put(key(), entry()) is True
    assert_same(entry(), store.get(key()))


def test_a_directory_that_was_replaced_is_used(root: Path, store: SharedDiskStore) -> None:
    store.put(key(), sized(10, 1))
    root.rename(root.with_name("old"))
    with opened(root) as other:
        other.put(key(), sized(10, 2))
    time.sleep(1.1)

    assert_same(sized(10, 2), store.get(key()))


def test_get_misses_after_the_directory_was_replaced_by_a_link_to_itself(
    root: Path, store: SharedDiskStore
) -> None:
    shutil.rmtree(root)
    root.symlink_to(root)
    time.sleep(1.1)

    assert store.get(key()) is None
    with pytest.raises(StoreUnavailable, match="symbolic links"):
        store.put(key(), sized(10))


def test_a_directory_that_became_a_file_is_a_miss_and_unavailable(
    root: Path, store: SharedDiskStore
) -> None:
    shutil.rmtree(root)
    root.write_text("no directory")
    time.sleep(1.1)

    assert store.get(key()) is None
    assert store.lookup([key()]) == [None]
    calls: tuple[Callable[[], object], ...] = (
        lambda: store.put(key(), entry()),
        lambda: list(store.ls()),
        store.stats,
        store.evict,
        lambda: store.purge("n"),
        store.namespaces,
        lambda: store.delete([key()]),
        lambda: store.register_namespace("m", "n"),
        lambda: opened(root),
    )
    for call in calls:
        with pytest.raises(StoreUnavailable):
            call()


def test_a_read_only_store_is_read_and_not_written(small_disk: Path) -> None:
    with opened(small_disk / "store") as store:
        store.put(key(), entry())
        subprocess.run(["/bin/mount", "-o", "remount,ro", str(small_disk)], check=True)

        assert_same(entry(), store.get(key()))
        assert store.lookup([key()])[0] is not None
        assert store.lease([key()], 5) == [None]
        with pytest.raises(StoreUnavailable):
            store.put(key("more"), entry())
        with pytest.raises(StoreUnavailable):
            store.sweep()
        with pytest.raises(StoreUnavailable):
            opened(small_disk / "store")


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


def test_get_of_a_closed_store_raises_store_unavailable(root: Path) -> None:
    store = opened(root)
    store.close()

    with pytest.raises(StoreUnavailable):
        store.get(key())


# Model-based test against a dictionary


class Model(RuleBasedStateMachine):
    """Two handles on a store of about 20 entries, and the entries that they may contain."""

    keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(os.environ.get("PYTEST_DEBUG_TEMPROOT", "/dev/shm"))  # noqa: S108
        self.root = self.folder / f"ec_store-model-{os.getpid()}-{time.monotonic_ns()}"
        self.stores = [opened(self.root, "max_bytes=128KiB") for _ in range(2)]
        self.put_in: dict[EntryKey, Entry] = {}
        self.leased: set[EntryKey] = set()

    @rule(target=keys, name=st.integers(0, 60))
    def name(self, name: int) -> EntryKey:
        return key(str(name))

    @rule(each=keys, seed=st.integers(0, 9), length=st.integers(0, 3000), n=st.integers(0, 1))
    def put(self, each: EntryKey, seed: int, length: int, n: int) -> None:
        kept = sized(length * 2, seed)
        try:
            if self.stores[n].put(each, kept):
                assert each not in self.leased
                self.put_in[each] = kept
        except StoreUnavailable:
            assert self.leased

    @rule(each=keys, n=st.integers(0, 1))
    def get(self, each: EntryKey, n: int) -> None:
        found = self.stores[n].get(each)
        if found is not None or each in self.leased:
            assert_same(self.put_in[each], found)

    @rule(each=keys, n=st.integers(0, 1))
    def lease(self, each: EntryKey, n: int) -> None:
        if len(self.leased) < 8 and self.stores[n].lease([each], 600)[0]:
            self.leased.add(each)

    @rule(each=consumes(keys), n=st.integers(0, 1))
    def delete(self, each: EntryKey, n: int) -> None:
        deleted = self.stores[n].delete([each])
        assert deleted <= (each in self.put_in)
        assert deleted or each not in self.leased
        self.put_in.pop(each, None)
        self.leased.discard(each)

    @rule(n=st.integers(0, 1))
    def evict(self, n: int) -> None:
        self.stores[n].evict()

    @invariant()
    def the_quota_holds_and_the_sum_is_right(self) -> None:
        size = entries_bytes(self.root)
        assert size <= 128 * 1024
        assert self.stores[0].stats().bytes == size
        assert {row.digest for row in self.stores[0].ls()} <= {each.digest for each in self.put_in}
        assert self.stores[0].stats().corrupt == 0

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        shutil.rmtree(self.root)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=scaled(40), stateful_step_count=60)
