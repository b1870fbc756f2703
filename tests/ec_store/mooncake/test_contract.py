"""Contract of a tier in Mooncake, on a real master, over TCP on the loopback."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ec_store import EntryKey
from ec_store.mooncake.client import LANES
from ec_store.mooncake.tier import MooncakeTier
from ec_store.testing.stores import Spoil, assert_same, entry, key, sized
from ec_store.testing.tiers import SharedTierContract, TierContract
from tests.ec_store.mooncake.tiers import SEGMENT, opened_tier
from tests.support.mooncake_server import MooncakeMaster
from tests.support.redis_server import RedisServer, free_port

Opened = Callable[[], MooncakeTier]


@pytest.fixture(scope="module")
def owner(master: MooncakeMaster, library: None) -> Iterator[MooncakeTier]:
    """Tier of another host, which contributes the only segment."""
    with opened_tier(master.url(SEGMENT)) as tier:
        yield tier


def clear(owner: MooncakeTier) -> None:
    with owner.client.lane() as lane:
        lane.remove_matching(".*")


@pytest.fixture
def opened(master: MooncakeMaster, owner: MooncakeTier) -> Iterator[Opened]:
    """Open tiers of hosts that contribute no segment."""
    clear(owner)
    with ExitStack() as stack:
        url = master.url("max_entry_bytes=16MiB")
        yield lambda: stack.enter_context(opened_tier(url))


@pytest.fixture
def spoil(owner: MooncakeTier) -> Spoil:
    def spoil(key: EntryKey) -> None:
        names = owner._names  # noqa: SLF001
        with owner.client.lane() as lane:
            [size] = lane.get([names.value(key)], len(lane.memory))
            lane.remove([names.value(key)])
            lane.memory[size - 1] ^= 1
            assert lane.put([names.value(key)], [size]) == [0]

    return spoil


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


class TestMooncake(TierContract):
    pass


class TestClaims(SharedTierContract):
    @pytest.fixture
    def opened(
        self, master: MooncakeMaster, owner: MooncakeTier, redis: RedisServer
    ) -> Iterator[Opened]:
        clear(owner)
        redis.command("FLUSHALL")
        url = master.url(f"max_entry_bytes=16MiB&claims=redis://127.0.0.1:{redis.port}/0")
        with ExitStack() as stack:
            yield lambda: stack.enter_context(opened_tier(url))


def test_claims_without_redis_are_those_of_each_host(opened: Opened) -> None:
    tier = opened()
    tier.put(key("there"), entry())
    found = tier.claim_missing([key("there").digest, key("missing").digest], b"owner", 5)

    assert [each if isinstance(each, bool) else each.key for each in found] == [key("there"), True]
    tier.release_claims([key("missing").digest], b"owner")


@pytest.mark.parametrize("lost", ["head", "value"])
def test_half_of_an_entry_is_a_miss_and_is_replaced(
    master: MooncakeMaster, opened: Opened, lost: str
) -> None:
    tier = opened()
    tier.put(key(), sized(100, 1))
    names = tier._names  # noqa: SLF001
    name = names.head(key().digest) if lost == "head" else names.value(key())
    with tier.client.lane() as lane:
        assert lane.remove([name]) == [True]

    assert tier.find([key().digest]) == [None]
    assert tier.put(key(), sized(100, 2)) is True
    assert_same(sized(100, 2), tier.get(key()))
    assert tier.find([key().digest]) != [None]
    assert len(master.names()) == 2


def test_hosts_read_each_other_with_a_metadata_service(tmp_path: Path, library: None) -> None:
    port = free_port()
    flags = {
        "enable_http_metadata_server": "true",
        "http_metadata_server_host": "127.0.0.1",
        "http_metadata_server_port": port,
    }
    with MooncakeMaster(tmp_path, flags) as master:
        service = f"metadata=http://127.0.0.1:{port}/metadata"
        with (
            opened_tier(master.url(f"{SEGMENT}&{service}")) as writer,
            opened_tier(master.url(f"max_entry_bytes=16MiB&{service}")) as reader,
        ):
            writer.put(key(), sized(100_000, 1))
            for tier in (writer, reader):
                assert_same(sized(100_000, 1), tier.get(key()))


def test_a_lane_is_not_reused_while_its_entry_is_referenced(opened: Opened) -> None:
    tier = opened()
    kept = [sized(1000, number) for number in range(LANES - 1)]
    for number, each in enumerate(kept):
        tier.put(key(str(number)), each)
    found = [tier.get(key(str(number))) for number in range(LANES - 1)]

    for expected, actual in zip(kept, found, strict=True):
        assert_same(expected, actual)
