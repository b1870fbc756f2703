from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ec_store import EntryKey
from ec_store.arena.connection import ArenaConnection
from ec_store.arena.store import ArenaStore
from ec_store.arena.url import ArenaOptions
from ec_store.testing.claims import ClaimsContract
from ec_store.testing.stores import Opened, StoreContract
from tests.ec_store.arena.served import hashed_pin, serving


class TestArena(StoreContract, ClaimsContract):
    # Releases with other headers have another version of the protocol, and refuse each other.
    test_an_entry_of_another_format_is_a_miss_and_stays = None  # type: ignore[assignment]
    test_a_put_replaces_an_entry_of_another_format = None  # type: ignore[assignment]

    @pytest.fixture
    def path(self, tmp_path: Path) -> Iterator[Path]:
        path = tmp_path / "arena.sock"
        with serving(path):
            yield path

    @pytest.fixture
    def opened(self, path: Path) -> Iterator[Opened]:
        stores: list[ArenaStore] = []

        def open_store() -> ArenaStore:
            stores.append(ArenaStore(ArenaOptions(str(path), timeout_s=10, verify=1)))
            return stores[-1]

        yield open_store
        for store in stores:
            store.close()

    @pytest.fixture
    def spoil(self, path: Path) -> Callable[[EntryKey], None]:
        def spoil(key: EntryKey) -> None:
            writer = ArenaConnection(str(path), "writer", 10)
            pin, arena = hashed_pin(writer, key)
            [part] = arena.parts(pin.extents, 1)
            part[0] ^= 1
            writer.close()

        return spoil
