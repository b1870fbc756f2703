"""Checksums that the server computes after the writes."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ec_store.arena import checksums
from ec_store.arena.connection import ArenaConnection
from ec_store.arena.protocol import Read
from ec_store.arena.store import ArenaStore
from ec_store.arena.url import ArenaOptions
from ec_store.entry import checksum
from ec_store.testing.stores import assert_same, key, sized
from tests.ec_store.arena.served import MIB, hashed_pin


@pytest.fixture
def connection(path: Path) -> Iterator[ArenaConnection]:
    connection = ArenaConnection(str(path), "writer", 10)
    yield connection
    connection.close()


class Held:
    """Checksum thread of a server, which computes nothing until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        monkeypatch.setattr(checksums, "checksum_of", self._compute)

    def _compute(self, parts: object) -> str:
        self.begun.set()
        assert self.go.wait(10)
        return "0" * 16


def test_an_entry_gets_the_checksum_of_all_its_extents(
    store: ArenaStore, connection: ArenaConnection
) -> None:
    written = sized(3 * MIB + 4098, 3)
    store.put(key(), written)
    pin, _ = hashed_pin(connection, key())

    assert len(pin.extents) > 1
    assert pin.checksum == checksum(written.data)


@pytest.mark.fault(114)
def test_an_entry_is_read_and_sound_before_it_has_a_checksum(
    store: ArenaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    store.put(key(), sized(MIB))
    assert held.begun.wait(10)

    assert_same(sized(MIB), store.get(key()))
    assert [row.problem for row in store.verify(fix=True)] == [None]
    assert store.put(key("large"), sized(8 * MIB)) is True  # it waits for no checksum
    held.go.set()


def test_a_checksum_is_not_that_of_an_entry_that_was_replaced_meanwhile(
    store: ArenaStore, connection: ArenaConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    store.put(key(), sized(MIB, 1))
    assert held.begun.wait(10)
    monkeypatch.undo()
    store.put(key(), sized(MIB, 2), replace=True)
    held.go.set()

    pin, _ = hashed_pin(connection, key())
    assert pin.checksum == checksum(sized(MIB, 2).data)


@pytest.mark.fault(114)
def test_verify_deletes_the_corrupt_entry_and_not_one_that_has_replaced_it(
    store: ArenaStore, connection: ArenaConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(key(), sized(MIB, 1))
    pin, arena = hashed_pin(connection, key())
    arena.parts(pin.extents, 1)[0][0] ^= 1
    replacing = ArenaStore(store.options)
    call = store.connection.call

    def replace_after_read(request: Any, *args: Any, **options: Any) -> Any:
        reply = call(request, *args, **options)
        if isinstance(request, Read):
            replacing.put(key(), sized(MIB, 2), replace=True)
        return reply

    monkeypatch.setattr(store.connection, "call", replace_after_read)
    [row] = store.verify(fix=True)
    assert row.problem == "its checksum does not match its payload"
    monkeypatch.undo()
    assert_same(sized(MIB, 2), store.get(key()))
    replacing.close()


@pytest.mark.fault(114)
def test_a_share_of_the_reads_is_verified(
    path: Path, store: ArenaStore, connection: ArenaConnection
) -> None:
    store.put(key(), sized(MIB, 1))
    pin, arena = hashed_pin(connection, key())
    arena.parts(pin.extents, 1)[0][0] ^= 1

    with ArenaStore(ArenaOptions(str(path), timeout_s=10, verify=0)) as trusting:
        assert trusting.get(key()) is not None
    assert store.get(key()) is None
    assert connection.call(Read([bytes.fromhex(key().digest)]))[0].pins[0].number == 0
    assert store.stats().corrupt == 1


def test_an_entry_that_is_read_while_it_is_hashed_keeps_its_first_checksum(
    store: ArenaStore, connection: ArenaConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    store.put(key(), sized(MIB))
    assert held.begun.wait(10)
    assert_same(sized(MIB), store.get(key()))
    monkeypatch.undo()  # the next checksum is another one
    held.go.set()
    store.put(key("later"), sized(MIB))
    hashed_pin(connection, key("later"))

    pin, _ = hashed_pin(connection, key())
    assert pin.checksum == "0" * 16
