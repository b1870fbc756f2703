"""The proxy in front of a store that is late, slow or unreachable."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from ec_store import open_store
from tests.requests import image, request
from tests.support.backed import NAMESPACE, Backed, caching, items_of
from tests.support.fleet import Fleet, Launch, until
from tests.support.redis_server import RedisServer
from tests.support.relay import Relay, Way


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def in_redis(redis: RedisServer, tmp_path: Path) -> Iterator[Backed]:
    """Return instances that reach Redis directly; only the proxy uses a relay."""
    with open_store(redis.url()) as store:
        store.register_namespace("m", NAMESPACE)
        yield Backed(store, tmp_path)


@asynccontextmanager
async def served(launch: Launch, in_redis: Backed, url: str, **config: Any) -> AsyncIterator[Fleet]:
    """Run a fleet; close the instances' connections to Redis at its end."""
    async with caching(launch, in_redis, url, **config) as fleet:
        yield fleet
        await asyncio.gather(*in_redis.writes)
        in_redis.store.close()


FAULTS: dict[str, Way] = {
    # Longer than a call's timeout, but not by much: the relay ends soon after the fleet.
    "late": Way(latency_s=3),
    "dribbling": Way(bytes_per_s=0.5),
    "silent": Way(cut_after=0, end="silence"),
    "reset": Way(cut_after=0, end="reset"),
    "closed": Way(cut_after=0, end="close"),
}


@pytest.mark.fault(16)
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_failing_redis_costs_its_budget_and_is_then_skipped(
    launch: Launch,
    redis: RedisServer,
    in_redis: Backed,
    fault: str,
) -> None:
    picture = request(image(fault.encode()))
    async with Relay(redis).running() as relay:
        url = relay.url("timeout=2s")
        async with served(launch, in_redis, url, ec_store_budget_s=1.0) as fleet:
            assert await items_of(fleet, picture) == {"encoded": 1}
            await asyncio.gather(*in_redis.writes)
            assert await items_of(fleet, picture) == {"hit": 1}
            relay.answers = FAULTS[fault]
            relay.listener.reset_all()
            # No request waits for Redis longer than its budget.
            async with asyncio.timeout(90):
                with capture_logs() as lines:
                    for _ in range(6):
                        assert await items_of(fleet, picture) == {"encoded": 1}

        assert any(
            line["event"].startswith("reading from the encoder store keeps failing")
            for line in lines
        )


@pytest.mark.fault(16)
@pytest.mark.fault(19)
async def test_a_redis_that_recovers_is_used_again(
    launch: Launch, redis: RedisServer, in_redis: Backed
) -> None:
    picture = request(image(b"again"))
    async with (
        Relay(redis).running() as relay,
        served(launch, in_redis, relay.url("timeout=1s")) as fleet,
    ):
        assert await items_of(fleet, picture) == {"encoded": 1}
        await asyncio.gather(*in_redis.writes)
        for _ in range(3):  # a connection that breaks between two requests is not a fault
            relay.listener.reset_all()
            assert await items_of(fleet, picture) == {"hit": 1}


async def test_closing_a_store_during_a_call_leaves_no_connection(
    redis: RedisServer,
) -> None:
    async with Relay(redis).running() as relay:
        store = open_store(relay.url("timeout=5s"))
        relay.answers = Way(cut_after=0, end="silence")
        asked = asyncio.create_task(asyncio.to_thread(store.namespaces))
        await until(lambda: relay.listener.connections == 1)
        store.close()
        relay.answers = Way()
        relay.listener.reset_all()

        await asked  # the call is retried on a new connection
        assert relay.listener.connections == 2
        await until(lambda: relay.listener.open == 0)
