"""Two hosts, each with a memory and a proxy: what is written on one is found on the other."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ec_store.arena.store import ArenaStore
from ec_store.arena.url import ArenaOptions
from tests.requests import image, request
from tests.support.backed import (
    Backed,
    caching,
    encoded,
    items_of,
    media_types,
    registered,
)
from tests.support.fleet import Fleet, Launch, until
from tests.support.redis_server import RedisServer

SERVE = """
import sys
from functools import partial
from ec_store.arena import server
from ec_store.__main__ import main
server.TierLimits = partial(server.TierLimits, lookup_s=float(sys.argv[1]))
main(["serve", *sys.argv[2:], "--port", "0"])
"""
"""`ec-store serve` with another time limit of look-ups in the tier."""

BODY = request(image(b"x" * 100_000))

StartHosts = Callable[..., list["Host"]]


@dataclass
class Host:
    """Memory of a host, and the fake instances that use it."""

    url: str
    backed: Backed


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def start_hosts(tmp_path: Path) -> Iterator[StartHosts]:
    with ExitStack() as stack:

        def start_host(name: str, lookup_s: float, options: Sequence[str]) -> Host:
            path = tmp_path / f"{name}.sock"
            url = f"shm://{path}?max_bytes=16MiB&timeout=20s"
            process = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", SERVE, str(lookup_s), url, *options])
            )
            stack.callback(process.terminate)
            store = stack.enter_context(ArenaStore(ArenaOptions(str(path), timeout_s=20)))
            return Host(url, Backed(store, tmp_path))

        def start_hosts(*options: str, lookup_s: float = 20) -> list[Host]:
            """Start two; a look-up has the time that a busy machine needs."""
            hosts = [start_host(name, lookup_s, options) for name in "ab"]
            deadline_s = time.monotonic() + 60
            for host in hosts:
                while not registered(host.backed.store):
                    assert time.monotonic() < deadline_s, "a server has not started"
                    time.sleep(0.02)
            return hosts

        yield start_hosts


@asynccontextmanager
async def proxies(launch: Launch, *hosts: Host) -> AsyncIterator[list[Fleet]]:
    """Run a proxy with instances on each host."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(caching(launch, host.backed, host.url))
            for host in hosts
        ]
        for host in hosts:  # the fleet watches the descriptors of this process
            await asyncio.gather(*host.backed.writes)
            host.backed.store.close()


async def test_an_entry_of_another_host_costs_no_encode_and_no_upload(
    launch: Launch, start_hosts: StartHosts, redis: RedisServer
) -> None:
    a, b = start_hosts("--tier", redis.url())
    async with proxies(launch, a, b) as (one, other):
        assert await items_of(one, BODY) == {"encoded": 1}
        await asyncio.gather(*a.backed.writes)
        await until(lambda: in_redis(redis))

        assert await items_of(other, BODY) == {"hit": 1}
        assert encoded(other) == 0
        assert media_types(other.d) == [["image_embeds"]]


async def test_an_encode_instance_and_its_consumer_may_be_on_two_hosts(
    launch: Launch, start_hosts: StartHosts, redis: RedisServer
) -> None:
    a, b = start_hosts("--tier", redis.url())
    async with proxies(launch, b) as [fleet]:
        fleet.e.chat = a.backed.encodes

        assert await items_of(fleet, BODY) == {"encoded": 1}
        assert media_types(fleet.d) == [["image_embeds"]]
        await asyncio.gather(*a.backed.writes)
        a.backed.store.close()


@pytest.mark.fault(110)
async def test_requests_are_served_while_the_tier_hangs(
    launch: Launch, start_hosts: StartHosts, redis: RedisServer
) -> None:
    _, host = start_hosts("--tier", redis.url("timeout=200ms"), lookup_s=0.01)
    async with proxies(launch, host) as [fleet]:
        with redis.paused():
            for number in range(4):
                body = request(image(str(number).encode()))
                assert await items_of(fleet, body) == {"encoded": 1}
                await asyncio.gather(*host.backed.writes)
                assert await items_of(fleet, body) == {"hit": 1}


async def test_the_proxy_of_another_host_sends_the_media_without_a_tier(
    launch: Launch, start_hosts: StartHosts
) -> None:
    a, b = start_hosts()
    async with proxies(launch, a, b) as (one, other):
        assert await items_of(one, BODY) == {"encoded": 1}
        await asyncio.gather(*a.backed.writes)

        assert await items_of(other, BODY) == {"encoded": 1}
        assert encoded(other) == 1


@pytest.mark.fault(111)
async def test_an_entry_that_is_found_in_the_tier_and_does_not_come_does_not_fail_the_request(
    launch: Launch, start_hosts: StartHosts, redis: RedisServer
) -> None:
    a, b = start_hosts("--tier", redis.url())
    async with proxies(launch, a, b) as (one, other):
        await items_of(one, BODY)
        await asyncio.gather(*a.backed.writes)
        await until(lambda: in_redis(redis))
        spoil(redis)

        items = await items_of(other, BODY)

        assert items.get("hit", 0) == 0, items
        assert media_types(other.d)[0] == ["image_embeds"]  # the header was found


def in_redis(redis: RedisServer) -> int:
    """Return the number of entries, without claims."""
    client: Any = redis.client
    return len(client.keys("*:e2"))


def spoil(redis: RedisServer) -> None:
    """Change the last byte of every entry."""
    client: Any = redis.client
    for name in client.keys("*:e2"):
        value = client.get(name)
        client.setrange(name, len(value) - 1, bytes([value[-1] ^ 1]))
