from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from ec_store import EntryKey
from ec_store.arena.connection import ArenaConnection
from ec_store.arena.store import ArenaStore
from ec_store.arena.tier import Tier, TierLimits
from ec_store.arena.url import ArenaOptions
from ec_store.disk.config import DiskConfig
from ec_store.disk.store import SharedDiskStore
from ec_store.redis.store import RedisStore
from ec_store.testing.claims import ClaimsContract
from ec_store.testing.stores import Opened, StoreContract
from tests.ec_store.arena.served import hashed_pin, serving
from tests.support.redis_server import RedisServer


class TestArena(StoreContract, ClaimsContract):
    # Releases with other headers have another version of the protocol, and refuse each other.
    test_an_entry_of_another_format_is_a_miss_and_stays = None  # type: ignore[assignment]
    test_a_put_replaces_an_entry_of_another_format = None  # type: ignore[assignment]

    @pytest.fixture
    def tiers(self) -> Mapping[str, Tier]:
        return {}

    @pytest.fixture
    def path(self, tmp_path: Path, tiers: Mapping[str, Tier]) -> Iterator[Path]:
        path = tmp_path / "arena.sock"
        with serving(path, tiers=tiers, tier_limits=TierLimits(lookup_s=20.0)):
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


def directory(path: Path) -> SharedDiskStore:
    return SharedDiskStore(DiskConfig(str(path / "nvme")))


def shared(redis: RedisServer) -> RedisStore:
    return RedisStore.from_url(redis.url("timeout=60s&connect_timeout=30s"))


class TestArenaAndDirectory(TestArena):
    # The sound entry comes back from the tier.
    test_a_spoiled_entry_is_a_miss_and_is_counted_and_forgotten = None  # type: ignore[assignment]
    test_an_entry_with_a_value_of_the_wrong_type_is_corrupt = None  # type: ignore[assignment]
    test_verify_finds_and_removes_corrupt_entries = None  # type: ignore[assignment]
    test_verify_removes_entries_with_values_of_the_wrong_type = None  # type: ignore[assignment]

    @pytest.fixture
    def tiers(self, tmp_path: Path) -> Mapping[str, Tier]:
        return {"file": directory(tmp_path)}


class TestArenaAndRedis(TestArenaAndDirectory):
    @pytest.fixture
    def tiers(self, redis: RedisServer) -> Mapping[str, Tier]:
        return {"redis": shared(redis)}


class TestArenaDirectoryAndRedis(TestArenaAndRedis):
    @pytest.fixture
    def tiers(self, tmp_path: Path, redis: RedisServer) -> Mapping[str, Tier]:
        return {"file": directory(tmp_path), "redis": shared(redis)}
