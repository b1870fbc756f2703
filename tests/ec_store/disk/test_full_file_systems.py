"""Store on a file system that other processes filled: no block or no inode is free."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ec_store import StoreUnavailable
from ec_store.disk import entry_files, ledger
from ec_store.disk.housekeeping import USELESS_S
from ec_store.disk.store import SharedDiskStore
from ec_store.testing.stores import assert_same, key, sized
from tests.ec_store.disk.on_disk import (
    age,
    entries_bytes,
    files,
    folder_of,
    later,
    opened,
    path_of,
)
from tests.small_disk import small_disk

pytestmark = pytest.mark.fault(91)

ENTRIES = [key(str(n)) for n in range(60)]


@contextmanager
def small_ext4(folder: Path, *options: str) -> Iterator[Path]:
    """Mount a disk of 32 MiB in a file, which only root may."""
    image = folder.with_name("image")
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(2**25)
    commands = (
        ["/usr/sbin/mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0", *options, str(image)],
        ["/bin/mount", "-o", "loop", str(image), str(folder)],
    )
    for command in commands:
        if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("needs to mount a file system in a file")
    try:
        yield folder
    finally:
        subprocess.run(["/bin/umount", "-l", str(folder)], check=True)


@pytest.fixture(params=["tmpfs, bytes", "tmpfs, files", "ext4, bytes", "ext4, files"])
def full(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of a store with entries, on a disk that others filled since."""
    kind, _, lacking = request.param.partition(", ")
    with (
        small_ext4(tmp_path / "disk", "-N", "512") if kind == "ext4" else _tmpfs(tmp_path / "disk")
    ) as disk:
        root = disk / "store"
        with opened(root) as store:
            for number, one in enumerate(ENTRIES):
                store.put(one, sized(100_000, number))
                age(path_of(root, one), 1000 - number)
        _fill(disk, files_only=lacking == "files")
        yield root


@contextmanager
def _tmpfs(folder: Path) -> Iterator[Path]:
    with small_disk(folder, "32m,nr_inodes=512") as disk:
        yield disk.path


def _fill(disk: Path, *, files_only: bool) -> None:
    for number in range(1000 if files_only else 20):
        with suppress(OSError), (disk / f"other-{number}").open("wb", buffering=0) as file:
            while not files_only:
                file.write(bytes(4096))
    free = os.statvfs(disk)
    # ext4 reports blocks as free that it reserves for its own tables.
    assert (free.f_favail if files_only else free.f_bavail) <= 4


def check_ledger(root: Path) -> None:
    total = ledger.total(folder_of(root))
    assert total.bytes == entries_bytes(root)
    assert total.entries == len(files(root, "entries"))


@pytest.mark.parametrize("length", [100, 100_000])
def test_put_evicts_and_writes(full: Path, length: int) -> None:
    with opened(full) as store:
        for number in range(3):
            assert store.put(key(f"new-{number}"), sized(length, number)) is True
        for number in range(3):
            assert_same(sized(length, number), store.get(key(f"new-{number}")))
        left = len(list(store.ls())) - 3

        assert store.stats().drops == 0
        assert store.stats().evictions == len(ENTRIES) - left > 0
        assert left > 0
    check_ledger(full)


@pytest.mark.parametrize("call", [SharedDiskStore.evict, SharedDiskStore.sweep])
def test_evict_and_sweep_restore_the_reserves(
    full: Path, call: Callable[[SharedDiskStore], int]
) -> None:
    with opened(full) as store:
        evicted = call(store)

        assert evicted == len(ENTRIES) - len(list(store.ls())) > 0
        free = os.statvfs(full)
        assert free.f_bavail >= 0.05 * free.f_blocks - 1
        assert free.f_favail >= 0.05 * free.f_files - 1
        assert store.evict() == 0
    check_ledger(full)


def test_gc_of_a_new_process_evicts(full: Path) -> None:
    command = [sys.executable, "-m", "ec_store", "gc", full.as_uri()]
    done = subprocess.run(command, check=False, capture_output=True, text=True)

    assert done.stdout.endswith(" entries removed\n"), done.stderr
    assert int(done.stdout.split(" ")[0]) == len(ENTRIES) - len(files(full, "entries")) > 0
    check_ledger(full)


def test_leased_entries_stay_and_the_put_is_dropped(full: Path) -> None:
    with opened(full) as store:
        for number in range(100):
            (full.parent / f"other-{number}").unlink(missing_ok=True)
        assert None not in store.lease(ENTRIES, 60)
        _fill(full.parent, files_only=os.statvfs(full).f_bavail > 0)
        with pytest.raises(StoreUnavailable):
            store.put(key("new"), sized(100))

        assert None not in store.lookup(ENTRIES)
        assert store.stats().drops == 1
    check_ledger(full)


class FullDisk:
    """File system on which only a removed file makes room, for one other file or name.

    Other processes take the room of the first three files.

    Attributes:
        room: files and names that may still be created.
        refused: calls that failed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        self.room = -3
        self.refused: list[str] = []
        self._code = code
        for name in ("symlink", "link", "mkdir", "open", "rename", "pwritev", "unlink"):
            monkeypatch.setattr(os, name, self._patched(name, getattr(os, name)))

    def _patched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            creates = name != "open" or args[1] & (os.O_CREAT | os.O_TMPFILE & ~os.O_DIRECTORY)
            needs = name != "unlink" and bool(creates)
            if needs and self.room <= 0:
                self.refused.append(name)
                raise OSError(self._code, os.strerror(self._code))
            done = real(*args, **kwargs)
            self.room += (name == "unlink") - (needs and name not in {"rename", "pwritev"})
            return done

        return call


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_eviction_needs_no_room_for_what_it_writes(
    root: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Locks and the ledger have their room."""
    with opened(root) as store:
        for number, one in enumerate(ENTRIES):
            store.put(one, sized(100, number))
            age(path_of(root, one), 1000 - number)
        store.lease(ENTRIES[:30], 60)
    with opened(root, "max_bytes=64GiB") as store:
        with monkeypatch.context() as patched:
            disk = FullDisk(patched, code)
            assert store.put(key("new"), sized(100)) is True
            assert disk.refused

        assert store.get(key("new")) is not None
        assert None not in store.lookup(ENTRIES[:30])
        assert 0 < store.stats().evictions <= 20
        store.delete([key("new")])
        assert store.stats().bytes == entries_bytes(root)
        assert store.stats().entries == len(files(root, "entries"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_writes_that_no_eviction_helps_do_not_empty_the_store(
    root: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    def fail_to_put(number: int) -> int:
        with pytest.raises(StoreUnavailable):
            store.put(key(f"new-{number}"), sized(100))
        return store.stats().evictions

    with opened(root) as store:
        for one in ENTRIES:
            store.put(one, sized(100))
        with monkeypatch.context() as patched:
            patched.setattr(entry_files, "write", full)
            evicted = fail_to_put(0)
            assert 0 < evicted < 10
            assert {fail_to_put(number) for number in range(1, 9)} == {evicted}

            with later(USELESS_S):
                assert fail_to_put(9) > evicted
        assert store.put(key("new"), sized(100)) is True
