"""Lock of a shared directory beside other processes, and on file systems with failing calls."""

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ec_store.disk.files import Folder, Modes
from ec_store.disk.lock import FileLock
from tests.ec_store.disk.on_disk import age, take_lock

NAME = "evicting.link"


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder.open_path(str(tmp_path), Modes())


@pytest.fixture
def lock() -> FileLock:
    return FileLock(NAME)


def test_lock_of_a_living_process_that_was_moved_by_mistake_is_put_back(
    tmp_path: Path, folder: Folder, lock: FileLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process breaks the old lock, and takes it, between this one's read and rename."""
    take_lock(tmp_path / NAME)
    age(tmp_path / NAME, 60)
    other, rename = FileLock(NAME), Folder.rename
    tokens: list[str] = []

    def late(here: Folder, name: str, new: str) -> None:
        if not tokens:
            monkeypatch.setattr(Folder, "rename", rename)
            token = other.acquire(folder, time.time)
            assert token is not None
            tokens.append(token)
        rename(here, name, new)

    monkeypatch.setattr(Folder, "rename", late)

    assert lock.acquire(folder, time.time) is None
    assert other.still_held(folder, tokens[0])
    assert folder.names() == [NAME]


def test_lock_that_was_moved_by_mistake_does_not_replace_a_third_one(
    tmp_path: Path, folder: Folder, lock: FileLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_lock(tmp_path / NAME)
    age(tmp_path / NAME, 60)
    rename = Folder.rename

    def late(here: Folder, name: str, new: str) -> None:
        take_lock(tmp_path / NAME, "elsewhere/1 2 second")
        rename(here, name, new)
        take_lock(tmp_path / NAME, "elsewhere/1 3 third")

    monkeypatch.setattr(Folder, "rename", late)

    assert lock.acquire(folder, time.time) is None
    assert str((tmp_path / NAME).readlink()) == "elsewhere/1 3 third"
    assert folder.names() == [NAME]


@pytest.mark.parametrize("name", ["utime", "readlink", "unlink"])
def test_lock_is_released_although_one_call_fails(
    folder: Folder, lock: FileLock, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    token = lock.acquire(folder, time.time)
    assert token is not None
    real, failures = getattr(os, name), iter([OSError(errno.EIO, "broken")])

    def failing(*args: Any, **kwargs: Any) -> Any:
        for error in failures:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, failing)
    lock.release(folder, token)

    assert folder.names() == []


def test_holder_keeps_its_lock_if_it_cannot_be_renewed(
    folder: Folder, lock: FileLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems set no times of links: the lock is broken when it is old."""

    def failing(*_: Any, **__: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "unsupported")

    token = lock.acquire(folder, time.time)
    assert token is not None
    monkeypatch.setattr(os, "utime", failing)

    assert lock.still_held(folder, token)
    assert FileLock(NAME).acquire(folder, lambda: time.time() + 60) is not None
    assert not lock.still_held(folder, token)


def test_lock_fits_in_the_inode_of_a_link(folder: Folder, lock: FileLock) -> None:
    token = lock.acquire(folder, time.time)

    assert token is not None
    assert len(token) + len(str(2**22)) - len(str(os.getpid())) < 60  # the upper bound of ext4


def test_lock_is_a_file_without_symbolic_links(
    tmp_path: Path, folder: Folder, lock: FileLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "symlink", failing)
    token = lock.acquire(folder, time.time)

    assert token is not None
    assert (tmp_path / NAME).is_file()
    assert lock.still_held(folder, token)
    assert FileLock(NAME).acquire(folder, time.time) is None
    age(tmp_path / NAME, 60)
    assert FileLock(NAME).acquire(folder, time.time) is not None
    assert not lock.still_held(folder, token)


def test_lock_is_not_taken_in_a_folder_that_was_removed(tmp_path: Path, lock: FileLock) -> None:
    folder = Folder.open_path(str(tmp_path / "gone"), Modes())
    (tmp_path / "gone").rmdir()

    with pytest.raises(FileNotFoundError):
        lock.acquire(folder, time.time)
