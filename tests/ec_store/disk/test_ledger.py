"""Ledger: its sum beside other processes, changes that fail, and a lost ledger."""

import errno
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_store import StoreUnavailable
from ec_store.disk import ledger
from ec_store.disk.files import Folder
from ec_store.disk.ledger import NAME, LedgerLost, Usage
from ec_store.disk.lock import lock, try_lock
from ec_store.testing.stores import key, sized
from tests.ec_store.children import start
from tests.ec_store.disk.on_disk import age, entries_bytes, folder_of, opened, path_of
from tests.support.once import after_next

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    folder = Folder.open_path(str(tmp_path / "ledger"), 0o750)
    ledger.create(folder, Usage())
    return folder


def charge(folder: Folder, size_bytes: int, entries: int = 1) -> None:
    with ledger.changing(folder) as change:
        change(Usage(charged_bytes=size_bytes, charged=entries))


def release(folder: Folder, size_bytes: int) -> None:
    with ledger.changing(folder) as change:
        change(Usage(released_bytes=size_bytes, released=1))


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> Iterator[None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        yield


def test_total_is_the_sum_of_all_processes(folder: Folder) -> None:
    for n in range(1, 40):
        charge(folder, 1000 * n)
        charge(folder, 1000 * n)
        release(folder, 1000 * n)

    assert ledger.total(folder) == Usage(2 * 780_000, 2 * 39, 780_000, 39)
    assert folder.names() == [NAME]


def change(folder: Folder, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        charge(folder, 2**30)
        release(folder, 2**30)


def test_no_change_of_another_process_is_missing_from_a_sum_or_in_it_twice(folder: Folder) -> None:
    """A sum that lacks a record is wrong by all that its processes have written and removed."""
    charge(folder, 5, 3)
    processes = [FORK.Process(target=change, args=(folder, 1.0)) for _ in range(4)]
    for process in processes:
        process.start()
    sums = []
    while any(process.is_alive() for process in processes):
        sums.append(ledger.total(folder))
    for process in processes:
        process.join()

    assert {process.exitcode for process in processes} == {0}
    assert len(sums) > 100
    assert {usage.bytes - 5 for usage in sums} <= {n * 2**30 for n in range(5)}
    assert {usage.entries for usage in sums} <= {3, 4, 5, 6, 7}
    assert sums[-1].charged > 1000
    assert (ledger.total(folder).bytes, ledger.total(folder).entries) == (5, 3)


@given(
    *(st.integers(0, 100) for _ in range(4)),
    st.integers(-50, 50),
    st.integers(0, 100),
    st.integers(0, 100),
)
def test_correction_is_exact_or_too_small_and_never_in_the_wrong_direction(  # noqa: PLR0913, PLR0917
    bytes_before: int, charged: int, released: int, later: int, error: int, seen: int, unseen: int
) -> None:
    """`seen` of the charged bytes and all but `unseen` of the released bytes are in the count."""
    before = Usage(bytes_before + 200 + error, 0, 0, 0)
    now = before + Usage(charged, 0, released, 0)
    count = bytes_before + 200 + min(seen, charged) - released + min(unseen, released)
    done = ledger._difference(before, now, count, 0)  # noqa: SLF001
    corrected = done.charged_bytes - done.released_bytes

    assert 0 <= -corrected <= max(0, error) or 0 <= corrected <= max(0, -error)
    if not charged and not released:
        assert corrected == -error
    again = ledger._difference(before, now + done + Usage(later), count, 0)  # noqa: SLF001
    assert again == Usage()


@contextmanager
def stopped(work: Callable[[], object]) -> Iterator[None]:
    """Run `work` in a child that stops itself."""
    child = start(work)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def stop_at_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: os.kill(os.getpid(), signal.SIGSTOP))


@pytest.mark.fault(94)
def test_process_that_was_stopped_within_a_change_stops_no_reader_and_drops_writes(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_within() -> None:
        stop_at_a_write(monkeypatch)
        charge(folder_of(root), 7)

    with opened(root) as store:
        store.put(key(), sized(10))
        with stopped(stop_within):
            assert store.get(key()) is not None
            assert store.lease([key()], 5)[0] is not None
            assert store.stats().entries == 1
            with pytest.raises(StoreUnavailable, match="keeps its ledger locked"):
                store.put(key("new"), sized(10))
            assert store.get(key("new")) is None
        assert store.put(key("new"), sized(10)) is True
        assert store.stats().bytes == entries_bytes(root)


@pytest.mark.fault(94)
def test_full_store_waits_once_for_a_process_that_was_stopped_within_a_change(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_within() -> None:
        stop_at_a_write(monkeypatch)
        charge(folder_of(root), 0, 0)

    names = [key(str(n)) for n in range(8)]
    with opened(root, f"max_bytes={8 * 4096}", look_every_s=3600) as store:
        for name in names:
            store.put(name, sized(10))
            age(path_of(root, name), 3600)
        with stopped(stop_within):
            waits = Mock(wraps=lock)
            monkeypatch.setattr(ledger, "lock", waits)
            with pytest.raises(StoreUnavailable, match="keeps its ledger locked"):
                store.put(key("new"), sized(10))
            assert waits.call_count == 1
            store._keeper.settings = replace(store.settings, ttl=60)  # noqa: SLF001
            with pytest.raises(StoreUnavailable, match="keeps its ledger locked"):
                store.sweep()
            assert waits.call_count == 2
        assert store.sweep() == 8


def test_lock_is_held_by_one_and_released_although_a_child_was_forked(folder: Folder) -> None:
    fds = [folder.open(NAME, os.O_RDONLY) for _ in range(2)]
    with lock(fds[0]):
        assert not try_lock(fds[1])
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        assert try_lock(fds[1])
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for fd in fds:
            os.close(fd)


# Changes that fail


@pytest.mark.parametrize("name", ["open", "pread", "pwrite"])
def test_change_that_could_not_be_written_is_not_counted(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    charge(folder, 1000)
    with (
        failing(monkeypatch, name, errno.EIO),
        pytest.raises(OSError, match=os.strerror(errno.EIO)),
    ):
        charge(folder, 5)
    charge(folder, 7)

    assert ledger.total(folder) == Usage(1007, 2)


def test_record_that_is_being_written_is_read_again(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    charge(folder, 1000)
    pread, cut = os.pread, iter([True])

    def torn(*args: Any) -> bytes:
        content = pread(*args)
        return content[:20] + bytes(20) + content[40:] if next(cut, False) else content

    monkeypatch.setattr(os, "pread", torn)

    assert ledger.total(folder) == Usage(1000, 1)
    assert next(cut, None) is None


# A lost ledger


@given(st.lists(st.integers(0, 2**60), min_size=4, max_size=4), st.integers(0, 40 * 8 - 1))
def test_flipped_bit_makes_a_record_invalid(figures: list[int], place: int) -> None:
    record = ledger._record(Usage(*figures))  # noqa: SLF001 - private: not imported by name
    flipped = bytearray(record)
    flipped[place // 8] ^= 1 << place % 8
    fd = os.memfd_create("ledger")
    try:
        os.pwrite(fd, record, 0)
        assert ledger._parse(fd) == Usage(*figures)  # noqa: SLF001
        os.pwrite(fd, flipped, 0)
        assert ledger._parse(fd) is None  # noqa: SLF001
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    os.truncate(path, 30)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def clear(path: Path) -> None:
    """Leave a file of zeros, as a power failure may."""
    path.write_bytes(bytes(path.stat().st_size))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)


LOSE = pytest.mark.parametrize("lose", [remove, cut, empty, clear, flip])


@LOSE
def test_lost_ledger_is_not_summed_until_it_is_created_again(
    folder: Folder, tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    charge(folder, 1000)
    lose(tmp_path / "ledger" / NAME)
    with pytest.raises(LedgerLost):
        ledger.total(folder)
    with pytest.raises(LedgerLost):
        charge(folder, 5)

    if not ledger.create(folder, Usage(10, 2)):
        ledger.restore(folder, Usage(10, 2))
    assert ledger.create(folder, Usage(30, 3)) is False
    ledger.restore(folder, Usage(30, 3))
    assert ledger.total(folder) == Usage(10, 2)


@pytest.mark.fault(116)
@LOSE
@pytest.mark.parametrize("reopened", [False, True])
def test_next_write_counts_the_entries_of_a_store_with_a_lost_ledger(
    root: Path, lose: Callable[[Path], None], reopened: bool
) -> None:
    with opened(root) as store:
        for n in range(5):
            store.put(key(str(n)), sized(5000))
        lose(root / NAME)
        with opened(root) as other:
            writer = other if reopened else store
            assert writer.get(key("0")) is not None
            with pytest.raises(LedgerLost):  # the caller of a get has a deadline
                ledger.total(folder_of(root))
            assert writer.put(key("new"), sized(10)) is True
            assert writer.stats().entries == 6
            assert writer.stats().bytes == entries_bytes(root)
        assert store.put(key("newer"), sized(10)) is True
        assert store.delete([key("newer")]) == 1
        assert store.evict() == 0
        assert store.stats().bytes == entries_bytes(root)


@pytest.mark.fault(116)
def test_command_that_creates_no_store_says_that_its_ledger_is_lost(root: Path) -> None:
    with opened(root) as store:
        store.put(key(), sized(10))
    (root / NAME).unlink()
    with opened(root, create=False) as command:
        assert command.get(key()) is not None
        for call in (command.stats, command.evict, command.sweep):
            with pytest.raises(StoreUnavailable, match="its ledger is missing"):
                call()
    assert not (root / NAME).exists()


def test_ledger_that_another_process_restored_meanwhile_is_not_replaced(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.replace(NAME, b"damaged")
    after_next(monkeypatch, Folder, "open", lambda _: ledger.restore(folder, Usage(10, 2)))
    ledger.restore(folder, Usage(30, 3))

    assert ledger.total(folder) == Usage(10, 2)
