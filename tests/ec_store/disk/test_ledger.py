"""Lines of the ledger: their sum, lines of ended processes, and invalid lines."""

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_store.disk.files import Folder, Modes
from ec_store.disk.ledger import IDLE_S, DeadWriters, Ledger, Usage
from tests.ec_store.contract import key, sized
from tests.ec_store.disk.on_disk import opened

LATER_S = IDLE_S + 60


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder.open_path(str(tmp_path / "usage"), Modes())


def names(folder: Folder) -> set[str]:
    return set(folder.names())


def now_s(folder: Folder) -> float:
    return max(folder.stat(name).st_ctime for name in folder.names())


def test_total_is_the_sum_of_all_processes(folder: Folder) -> None:
    for n in range(1, 5):
        ledger = Ledger()
        ledger.charge(folder, 1000 * n)
        ledger.charge(folder, 1000 * n)
        ledger.release(folder, 1000 * n)

    assert Ledger().total(folder) == Usage(20_000, 8, 10_000, 4)
    assert len(names(folder)) == 4


def test_merge_takes_over_the_lines_of_processes_that_ended(folder: Folder) -> None:
    for _ in range(5):
        Ledger().charge(folder, 1000)
    ledger = Ledger()
    ledger.charge(folder, 1)
    total = ledger.total(folder)
    ledger.merge(folder, now_s(folder) + IDLE_S - 60)
    assert len(names(folder)) == 6
    ledger.merge(folder, now_s(folder) + LATER_S)

    assert len(names(folder)) == 1
    assert ledger.total(folder) == total


def test_a_process_begins_a_new_line_after_its_line_was_merged(folder: Folder) -> None:
    idle, evictor = Ledger(), Ledger()
    idle.charge(folder, 1000)
    evictor.charge(folder, 1)
    evictor.merge(folder, now_s(folder) + LATER_S)
    idle.charge(folder, 500)
    idle.release(folder, 1000)

    assert evictor.total(folder) == Usage(1501, 3, 1000, 1)


def test_writer_whose_line_was_merged_is_alive_while_it_begins_a_new_one(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other threads name staging files meanwhile, which an eviction removes if they look dead."""
    idle, evictor = Ledger(), Ledger()
    idle.charge(folder, 1000)
    evictor.charge(folder, 1)
    evictor.merge(folder, now_s(folder) + LATER_S)
    flock, dead = fcntl.flock, list[bool]()

    def before(fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX:
            dead.append(idle.writer(folder) in DeadWriters(folder))
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", before)
    idle.charge(folder, 500)

    assert dead == [False]
    assert idle.writer(folder) not in DeadWriters(folder)


def test_line_that_changes_while_it_is_merged_is_not_lost(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, evictor = Ledger(), Ledger()
    writer.charge(folder, 1000)
    remove = Folder.remove

    def first_change(here: Folder, name: str) -> bool:
        monkeypatch.undo()
        writer.charge(folder, 500)
        return remove(here, name)

    monkeypatch.setattr(Folder, "remove", first_change)
    evictor.merge(folder, now_s(folder) + LATER_S)
    writer.charge(folder, 1)

    assert evictor.total(folder) == Usage(charged_bytes=1501, charged=3)


@pytest.mark.parametrize(
    "name",
    [
        "x",
        "0123456789abcdef",
        "0123456789abcdef.ff.1.0.0.00000000",
        "0123456789abcdef.ffffffffffffffff.1.0.0.00000000",
        "0" * 200,
        "línea\udcff",
    ],
)
def test_bad_line_stops_nothing_and_is_removed_later(folder: Folder, name: str) -> None:
    ledger = Ledger()
    ledger.charge(folder, 1000)
    os.close(folder.create(name))

    assert ledger.total(folder) == Usage(1000, 1)
    ledger.charge(folder, 1)
    ledger.merge(folder, now_s(folder))
    assert name in names(folder)
    ledger.merge(folder, now_s(folder) + LATER_S)
    assert name not in names(folder)
    assert ledger.total(folder) == Usage(1001, 2)


def test_store_writes_on_beside_bad_lines(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        store.put(key("a"), sized(10))
        (tmp_path / "store" / "usage" / "x").write_bytes(b"\x7f" * 32)

        assert store.put(key("b"), sized(10))
        assert store.sweep() == 0
        assert store.stats().entries == 2


def test_a_store_with_only_bad_lines_is_counted_at_the_open(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        store.put(key("a"), sized(10))
        before = store.stats()
    [line] = (tmp_path / "store" / "usage").iterdir()
    line.rename(line.with_name("0123456789abcdef"))
    with opened(tmp_path / "store") as store:
        assert store.stats().bytes == before.bytes
        assert store.stats().entries == 1


@given(st.lists(st.integers(0, 2**40), min_size=4, max_size=4), st.integers(0, 60))
def test_flipped_digit_makes_a_line_invalid(figures: list[int], place: int) -> None:
    from ec_store.disk import ledger  # noqa: PLC0415 - private: not imported by name

    line = ledger._line("0123456789abcdef", Usage(*figures))  # noqa: SLF001
    place %= len(line)
    flipped = line[:place] + ("0" if line[place] != "0" else "1") + line[place + 1 :]

    assert ledger._read(line) == ("0123456789abcdef", Usage(*figures))  # noqa: SLF001
    assert ledger._read(flipped) is None  # noqa: SLF001


def test_change_that_could_not_be_written_is_not_counted(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger()
    ledger.charge(folder, 1000)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises(OSError, match="broken"):
            ledger.charge(folder, 5)
    ledger.charge(folder, 7)

    assert ledger.total(folder) == Usage(1007, 2)


def test_a_rename_with_a_lost_reply_is_counted_once(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, rename = Ledger(), os.rename
    ledger.charge(folder, 1000)

    def repeated(*args: Any, **kwargs: Any) -> None:
        rename(*args, **kwargs)
        rename(*args, **kwargs)

    monkeypatch.setattr(os, "rename", repeated)
    ledger.charge(folder, 5)

    assert ledger.total(folder) == Usage(1005, 2)
    assert len(names(folder)) == 1


def test_line_read_under_two_names_counts_once(folder: Folder) -> None:
    ledger = Ledger()
    ledger.charge(folder, 1000)
    [before] = names(folder)
    ledger.charge(folder, 5)
    os.close(folder.create(before))

    assert ledger.total(folder) == Usage(1005, 2)


def test_charge_with_a_failed_close_is_counted_only_if_it_succeeds(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, close, charged = Ledger(), os.close, Usage()

    def failing(fd: int) -> None:
        close(fd)
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch, suppress(OSError):
        patch.setattr(os, "close", failing)
        ledger.charge(folder, 1000)
        charged = Usage(1000, 1)
    ledger.charge(folder, 1)

    assert ledger.total(folder) == charged + Usage(1, 1)
    assert len(names(folder)) == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_release_that_could_not_be_written_is_written_with_the_next_change(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    ledger = Ledger()
    ledger.charge(folder, 1000)

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        ledger.release(folder, 400)
        # An evictor of this process must not evict the same bytes once more.
        assert ledger.total(folder) == Usage(1000, 1, 400, 1)
        with pytest.raises(OSError, match="no room"):
            ledger.charge(folder, 5)
    ledger.charge(folder, 7)

    assert ledger.total(folder) == Ledger().total(folder) == Usage(1007, 2, 400, 1)


def test_merged_line_that_could_not_be_written_is_written_with_the_next_change(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, ledger = Ledger(), Ledger()
    ended.charge(folder, 1000)
    ledger.charge(folder, 1)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        ledger.merge(folder, now_s(folder) + LATER_S)
    assert len(names(folder)) == 1
    ledger.release(folder, 1)

    assert Ledger().total(folder) == Usage(1001, 2, 1, 1)
