"""Ledger: its sum beside other processes, changes that fail, and a lost ledger."""

import errno
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_store import StoreUnavailable
from ec_store.disk import ledger as ledgers
from ec_store.disk.files import Folder, Modes
from ec_store.disk.ledger import NAME, SLOT_BYTES, SLOTS, Ledger, LedgerLost, Usage
from ec_store.disk.lock import lock
from tests.ec_store.children import start
from tests.ec_store.contract import key, sized
from tests.ec_store.disk.on_disk import entries_bytes, folder_of, opened

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    folder = Folder.open_path(str(tmp_path / "ledger"), Modes())
    Ledger().create(folder, Usage())
    return folder


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> Iterator[None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        yield


def test_total_is_the_sum_of_all_processes(folder: Folder) -> None:
    for n in range(1, 40):
        ledger = Ledger()
        ledger.charge(folder, 1000 * n)
        ledger.charge(folder, 1000 * n)
        ledger.release(folder, 1000 * n)

    assert Ledger().total(folder) == Usage(2 * 780_000, 2 * 39, 780_000, 39)
    assert folder.names() == [NAME]
    assert folder.stat(NAME).st_size == SLOTS * SLOT_BYTES


def change(folder: Folder, seconds: float) -> None:
    ledger, until_s = Ledger(), time.monotonic() + seconds
    while time.monotonic() < until_s:
        ledger.charge(folder, 2**30)
        ledger.release(folder, 2**30)


def test_no_change_of_another_process_is_missing_from_a_sum_or_in_it_twice(folder: Folder) -> None:
    """A sum that lacks a record is wrong by all that its processes have written and removed."""
    Ledger().charge(folder, 5, 3)
    processes = [FORK.Process(target=change, args=(folder, 1.0)) for _ in range(4)]
    for process in processes:
        process.start()
    sums = []
    while any(process.is_alive() for process in processes):
        sums.append(Ledger().total(folder))
    for process in processes:
        process.join()

    assert {process.exitcode for process in processes} == {0}
    assert len(sums) > 100
    assert {usage.bytes - 5 for usage in sums} <= {n * 2**30 for n in range(5)}
    assert {usage.entries for usage in sums} <= {3, 4, 5, 6, 7}
    assert sums[-1].charged > 1000
    assert (Ledger().total(folder).bytes, Ledger().total(folder).entries) == (5, 3)


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


@pytest.mark.fault(94)
def test_process_that_was_stopped_within_a_change_stops_no_other(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_within() -> None:
        monkeypatch.setattr(os, "pwrite", lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
        Ledger().charge(folder, 7)

    with stopped(stop_within):
        for _ in range(4 * SLOTS):
            Ledger().charge(folder, 5)

        assert Ledger().total(folder) == Usage(5 * 4 * SLOTS, 4 * SLOTS)


def test_change_fails_where_other_processes_keep_all_records_locked(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, "BUSY_S", 0.01)
    fd = folder.open(NAME, os.O_RDWR)
    assert all(lock(fd, slot) for slot in range(SLOTS))
    with pytest.raises(OSError, match="keep its ledger locked"):
        Ledger().charge(folder, 5)
    assert Ledger().total(folder) == Usage()
    os.close(fd)
    Ledger().charge(folder, 5)

    assert Ledger().total(folder) == Usage(5, 1)


def test_lock_is_held_by_one_and_ends_with_its_process(folder: Folder) -> None:
    ledger = Ledger()

    def hold() -> None:
        with ledger.sweeping(folder) as held:
            assert held
            os.kill(os.getpid(), signal.SIGSTOP)

    with stopped(hold), ledger.sweeping(folder) as held:
        assert not held
    for _ in range(2):
        with ledger.sweeping(folder) as held, ledger.sweeping(folder) as again:
            assert (held, again) == (True, False)


def test_lock_is_released_although_a_child_was_forked_meanwhile(folder: Folder) -> None:
    ledger = Ledger()
    with ledger.sweeping(folder):
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        with ledger.sweeping(folder) as held:
            assert held
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# Changes that fail


@pytest.mark.parametrize("name", ["open", "pread", "pwrite"])
def test_change_that_could_not_be_written_is_not_counted(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ledger = Ledger()
    ledger.charge(folder, 1000)
    with (
        failing(monkeypatch, name, errno.EIO),
        pytest.raises(OSError, match=os.strerror(errno.EIO)),
    ):
        ledger.charge(folder, 5)
    ledger.charge(folder, 7)

    assert ledger.total(folder) == Usage(1007, 2)


def test_change_is_counted_once_if_the_close_fails(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, close = Ledger(), os.close

    def failing_close(fd: int) -> None:
        close(fd)
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", failing_close)
        ledger.charge(folder, 1000)

    assert ledger.total(folder) == Usage(1000, 1)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_release_that_could_not_be_written_is_written_with_the_next_change(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    ledger = Ledger()
    ledger.charge(folder, 1000)
    with failing(monkeypatch, "pwrite", code):
        ledger.release(folder, 400)
        # An evictor of this process must not evict the same bytes once more.
        assert ledger.total(folder) == Usage(1000, 1, 400, 1)
        with pytest.raises(OSError, match=os.strerror(code)):
            ledger.charge(folder, 5)
    ledger.charge(folder, 7)

    assert ledger.total(folder) == Ledger().total(folder) == Usage(1007, 2, 400, 1)


def test_record_that_is_being_written_is_read_again(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ledger().charge(folder, 1000)
    pread, cut = os.pread, iter([True])

    def torn(*args: Any) -> bytes:
        content = pread(*args)
        return content[:20] + bytes(20) + content[40:] if next(cut, False) else content

    monkeypatch.setattr(os, "pread", torn)

    assert Ledger().total(folder) == Usage(1000, 1)
    assert next(cut, None) is None


# A lost ledger


@given(st.lists(st.integers(0, 2**60), min_size=4, max_size=4), st.integers(0, 40 * 8 - 1))
def test_flipped_bit_makes_a_record_invalid(figures: list[int], place: int) -> None:
    record = ledgers._record(Usage(*figures))  # noqa: SLF001 - private: not imported by name
    flipped = bytearray(record)
    flipped[place // 8] ^= 1 << place % 8

    assert ledgers._parse(record) == tuple(figures)  # noqa: SLF001
    assert ledgers._parse(bytes(flipped)) is None  # noqa: SLF001


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    os.truncate(path, 100)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def clear(path: Path) -> None:
    """Leave a file of zeros, as a power failure may."""
    path.write_bytes(bytes(path.stat().st_size))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[7 * SLOT_BYTES] ^= 1
    path.write_bytes(content)


def change_every_record(ledger: Ledger, folder: Folder) -> None:
    for _ in range(1000):
        ledger.add(folder, Usage())


LOSE = pytest.mark.parametrize("lose", [remove, cut, empty, clear, flip])


@LOSE
def test_lost_ledger_is_not_summed_until_it_is_created_again(
    folder: Folder, tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    ledger, path = Ledger(), tmp_path / "ledger" / NAME
    ledger.charge(folder, 1000)
    lose(path)
    with pytest.raises(LedgerLost):
        ledger.total(folder)
    with pytest.raises(LedgerLost):
        change_every_record(ledger, folder)
    ledger.release(folder, 1000)  # nothing of it is left for the next ledger
    with pytest.raises(LedgerLost):
        ledger.total(folder)

    ledger.discard_damaged(folder)
    assert ledger.create(folder, Usage(10, 2)) is True
    assert ledger.create(folder, Usage(30, 3)) is False
    assert ledger.total(folder) == Ledger().total(folder) == Usage(10, 2)


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
                Ledger().total(folder_of(root))
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


def test_ledger_that_another_process_restored_meanwhile_is_not_discarded(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.replace(NAME, b"damaged")
    open_file = Folder.open

    def restored_meanwhile(here: Folder, name: str, flags: int) -> int:
        fd = open_file(here, name, flags)
        monkeypatch.setattr(Folder, "open", open_file)
        Ledger().discard_damaged(folder)
        Ledger().create(folder, Usage(10, 2))
        return fd

    monkeypatch.setattr(Folder, "open", restored_meanwhile)
    Ledger().discard_damaged(folder)

    assert Ledger().total(folder) == Usage(10, 2)
