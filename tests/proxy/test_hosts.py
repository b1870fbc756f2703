"""The proxy in front of several hosts, each with a memory and a server that its instances name."""

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError
from structlog.testing import capture_logs

import epd
from ec_store import EntryKey, open_store
from ec_store.arena.store import ArenaStore
from tests.ec_store.arena.remote import KEY, free_port
from tests.proxy.test_remote_store import served
from tests.requests import image, request
from tests.support.backed import BUDGET_S, NAMESPACE, Backed, items_of, registered
from tests.support.fake_instance import (
    FakeInstance,
    after,
    decodes,
    encodes,
    fails_first,
    page,
    refuses,
)
from tests.support.fleet import Fleet, Launch, until
from tests.support.redis_server import RedisServer


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EC_STORE_API_KEY", KEY)


@dataclass
class OneHost:
    """Server of a host, and what its instances do.

    Attributes:
        tier: digest that its instances name; empty for that of the server.
        arena: memory that they name; None for that of the server.
        nameless: whether they name no server.
        writes: whether they say that they write their encoder outputs.
    """

    name: str
    store: ArenaStore
    process: subprocess.Popen[bytes]
    port: int
    backed: Backed
    tier: str = ""
    arena: str | None = None
    nameless: bool = False
    writes: bool = False
    asked: int = field(default=0)

    async def metrics(self) -> web.Response:
        self.asked += 1
        arena = self.store.connection.arena
        memory = self.arena or ("" if arena is None else arena.name.hex())
        address = f"shm+tcp://127.0.0.1:{self.port}"
        tier = self.tier or ("" if arena is None else arena.tier)
        labels = f'address="{address}",arena="{memory}",engine="0",tier="{tier}"'
        host = "" if self.nameless else f"vllm:ec_store_host_info{{{labels}}} 1.0\n"
        return web.Response(
            text=f"# HELP\n{host}"
            f'vllm:ec_store_producer{{engine="0"}} {float(self.writes)}\n'
            f'vllm:ec_store_namespace_info{{engine="0",namespace="{NAMESPACE}"}} 1.0\n'
            'vllm:num_requests_running{engine="0"} 0\nvllm:num_requests_waiting{engine="0"} 0\n'
        )

    def has(self, *instances: FakeInstance) -> None:
        """Let these instances be on this host; the first kind of each is by its role."""
        for instance in instances:
            instance.metrics = self.metrics
            instance.chat = self.backed.encodes if instance.chat is encodes else self.backed.decodes


@asynccontextmanager
async def host(folder: Path, name: str, *flags: str) -> AsyncIterator[OneHost]:
    path, port = folder / f"{name}.sock", free_port()
    with served(path, port, *flags) as process, open_store(f"shm://{path}?timeout=20s") as store:
        assert isinstance(store, ArenaStore)
        await until(lambda: registered(store))
        backed = Backed(store, folder)
        yield OneHost(name, store, process, port, backed)
        await asyncio.gather(*backed.writes)


@asynccontextmanager
async def two_hosts(folder: Path, *flags: str) -> AsyncIterator[tuple[OneHost, OneHost]]:
    async with AsyncExitStack() as stack:
        a, b = [await stack.enter_async_context(host(folder, name, *flags)) for name in "ab"]
        yield a, b


@asynccontextmanager
async def fleet_of(launch: Launch, *hosts: OneHost, **config: Any) -> AsyncIterator[Fleet]:
    """Run a fleet with an encode instance and a consumer on each of these hosts."""
    settings: dict[str, Any] = {
        "ec_store": "shm+tcp://?timeout=20s",
        "ec_store_budget_s": BUDGET_S,
        "load_interval_s": 0.2,
        "encode": len(hosts),
        "decode": len(hosts),
    }
    async with launch(**settings | config) as fleet:
        for number, each in enumerate(hosts):
            each.has(*fleet.encode[number : number + 1], *fleet.decode[number : number + 1])
        yield fleet


async def known(*hosts: OneHost) -> None:
    """Wait until the proxy has read what these hosts name, and has connected to them."""
    await asyncio.sleep(0)
    counts = [each.asked for each in hosts]
    await until(
        lambda: all(each.asked > count + 3 for each, count in zip(hosts, counts, strict=True))
    )
    await asyncio.sleep(0.3)


def calls(instances: list[FakeInstance]) -> list[int]:
    return [len(instance.calls) for instance in instances]


async def test_a_request_goes_to_the_host_that_has_its_entry(
    launch: Launch, tmp_path: Path
) -> None:
    async with two_hosts(tmp_path) as (a, b), fleet_of(launch, a, b) as fleet:
        await known(a, b)
        for content in (b"1", b"2", b"3", b"4"):
            assert await items_of(fleet, request(image(content))) == {"encoded": 1}
        await asyncio.gather(*a.backed.writes, *b.backed.writes)
        entries = [each.store.stats().entries or 0 for each in (a, b)]
        # Each was encoded on the host of its consumer, and both hosts were used.
        assert calls(fleet.encode) == calls(fleet.decode) == entries
        assert min(entries) > 0
        for content in (b"1", b"1", b"1", b"2", b"2", b"2", b"3", b"3", b"3", b"4", b"4", b"4"):
            assert await items_of(fleet, request(image(content))) == {"hit": 1}
        assert sum(calls(fleet.encode)) == 4
        assert calls(fleet.decode) == [4 * count for count in entries]


async def test_the_page_shows_the_memory_of_each_host(launch: Launch, tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (a, b), fleet_of(launch, a, b) as fleet:
        await known(a, b)
        assert await items_of(fleet, request(image(b"1"))) == {"encoded": 1}
        await asyncio.gather(*a.backed.writes, *b.backed.writes)
        async with fleet.http.get(f"{fleet.url}/ui/state") as reply:
            state = await reply.json()
        expected = {f"127.0.0.1:{each.port}": each.store.stats() for each in (a, b)}
        # The page has used the connections of the requests, and has ended none.
        assert await items_of(fleet, request(image(b"1"))) == {"hit": 1}

    assert state["store"] == "shm+tcp"
    assert {
        store["name"]: (store["entries"], store["bytes"], store["max_bytes"], store["evictions"])
        for store in state["stores"]
    } == {
        name: (stats.entries, stats.bytes, stats.max_bytes, 0) for name, stats in expected.items()
    }
    assert sum(store["entries"] for store in state["stores"]) == 1


async def test_requests_for_one_entry_are_bounded_by_load(launch: Launch, tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (a, b), fleet_of(launch, a, b) as fleet:
        await known(a, b)
        assert await items_of(fleet, request(image(b"1"))) == {"encoded": 1}
        await asyncio.gather(*a.backed.writes, *b.backed.writes)
        before = calls(fleet.decode)
        many = [items_of(fleet, request(image(b"1"))) for _ in range(24)]
        results = await asyncio.gather(*many)
        counts = [now - then for now, then in zip(calls(fleet.decode), before, strict=True)]
        # The other host encodes it once, and has it then too.
        assert sum(result == {"encoded": 1} for result in results) <= 1
        assert sum(calls(fleet.encode)) <= 2
        assert sum(counts) == 24
        assert min(counts) > 0


@pytest.mark.fault(155)
async def test_a_consumer_beyond_the_reach_of_all_encoders_gets_the_media(
    launch: Launch, tmp_path: Path
) -> None:
    async with two_hosts(tmp_path) as (a, b), fleet_of(launch, a, decode=1) as fleet:
        b.has(fleet.d)
        fleet.d.chat = decodes
        await known(a, b)
        assert await items_of(fleet, request(image(b"1"))) == {"local": 1}
        assert calls(fleet.encode) == [0]
        assert fleet.events.requests[-1].placements == {("local", "out_of_reach"): 1}
        a.tier = b.tier = "cafe"
        await known(a, b)
        assert await items_of(fleet, request(image(b"2"))) == {"encoded": 1}
        assert calls(fleet.encode) == [1]


@pytest.mark.fault(155)
async def test_a_consumer_that_may_not_encode_gets_no_item_out_of_its_reach(
    launch: Launch, tmp_path: Path
) -> None:
    config = {"decode": 1, "on_encode_failure": "fail"}
    async with two_hosts(tmp_path) as (a, b), fleet_of(launch, a, **config) as fleet:
        b.has(fleet.d)
        await known(a, b)
        status, body = await fleet.chat(request(image(b"1")))
        assert (status, body["error"]["code"]) == (503, 503), body
        assert "within its reach" in body["error"]["message"]
        assert calls(fleet.encode) == calls(fleet.decode) == [0]


@pytest.mark.fault(155)
async def test_consumers_within_the_reach_of_an_encoder_are_preferred(
    launch: Launch, tmp_path: Path
) -> None:
    async with two_hosts(tmp_path) as (a, b), fleet_of(launch, a, decode=2) as fleet:
        b.has(fleet.decode[1])
        await known(a, b)
        for content in (b"1", b"2", b"3"):
            assert await items_of(fleet, request(image(content))) == {"encoded": 1}
        assert calls(fleet.decode) == [3, 0]


async def test_an_encoder_on_the_host_of_the_consumer_is_preferred_to_a_shared_tier(
    launch: Launch, tmp_path: Path
) -> None:
    async with two_hosts(tmp_path) as (a, b), fleet_of(launch, a, b) as fleet:
        a.tier = b.tier = "cafe"
        await known(a, b)
        for content in (b"1", b"2", b"3", b"4"):
            assert await items_of(fleet, request(image(content))) == {"encoded": 1}
        assert calls(fleet.encode) == calls(fleet.decode)


async def test_an_entry_of_another_host_is_a_hit_through_a_shared_tier(
    launch: Launch, tmp_path: Path
) -> None:
    """A real server of each host, and a real Redis; each consumer reads its own host's memory."""
    pictures = [request(image(content)) for content in (b"1", b"2", b"3", b"4", b"5")]
    with RedisServer(tmp_path / "redis") as redis:
        tier = f"--tier={redis.url('timeout=20s')}"
        async with two_hosts(tmp_path, tier) as (a, b):
            async with fleet_of(launch, a) as fleet:
                await known(a)
                for picture in pictures:
                    assert await items_of(fleet, picture) == {"encoded": 1}
                await asyncio.gather(*a.backed.writes)
            await until(lambda: redis.command("DBSIZE") >= len(pictures))
            async with fleet_of(launch, a, decode=1) as fleet:
                b.has(fleet.d)
                await known(a, b)
                found = [await items_of(fleet, picture) for picture in pictures]
                # On a busy machine, a tier may answer after its 10 ms: a miss.
                hits = found.count({"hit": 1})
                assert hits > 0
                assert calls(fleet.encode) == [len(pictures) - hits]
                assert calls(fleet.decode) == [len(pictures)]


@pytest.mark.fault(153)
async def test_the_instances_of_a_host_without_its_server_are_served_with_media(
    launch: Launch, tmp_path: Path
) -> None:
    async with two_hosts(tmp_path) as (a, b), fleet_of(launch, a, b) as fleet:
        await known(a, b)
        a.process.send_signal(signal.SIGKILL)
        a.process.wait()
        for instance, usual in ((fleet.encode[0], encodes), (fleet.decode[0], decodes)):
            instance.chat = usual
        for content in (b"1", b"2", b"3", b"4"):
            assert await items_of(fleet, request(image(content))) == {"encoded": 1}
        await asyncio.gather(*b.backed.writes)
        found = [await items_of(fleet, request(image(content))) for content in (b"1", b"2", b"3")]
        assert {"hit": 1} in found  # on the other host


@pytest.mark.fault(154)
async def test_a_memory_other_than_the_instances_is_not_used(
    launch: Launch, tmp_path: Path
) -> None:
    async with host(tmp_path, "a") as a, fleet_of(launch, a) as fleet:
        await known(a)
        assert await items_of(fleet, request(image(b"1"))) == {"encoded": 1}
        await asyncio.gather(*a.backed.writes)
        assert await items_of(fleet, request(image(b"1"))) == {"hit": 1}
        a.arena = "ab" * 16
        with capture_logs() as lines:
            await known(a)
            for _ in range(2):
                assert await items_of(fleet, request(image(b"1"))) == {"encoded": 1}
        [line] = [line for line in lines if "another memory" in line["event"]]
        assert line["server"].endswith(str(a.port))
        a.arena = None
        await known(a)
        assert await items_of(fleet, request(image(b"1"))) == {"hit": 1}


async def test_instances_of_a_host_share_a_connection(launch: Launch, tmp_path: Path) -> None:
    async with host(tmp_path, "a") as a, fleet_of(launch, a, encode=2, decode=3) as fleet:
        a.has(*fleet.encode[1:], *fleet.decode[1:])
        await known(a)
        assert await items_of(fleet, request(image(b"1"))) == {"encoded": 1}
        stats = await asyncio.to_thread(a.store.stats)
        assert stats.memory is not None
        assert stats.memory.clients == 2  # the engines' store, and the proxy


@pytest.mark.parametrize("url", ["shm+tls://?timeout=20s"])
async def test_a_server_without_tls_gets_no_key_of_a_proxy_that_wants_tls(
    launch: Launch, tmp_path: Path, url: str
) -> None:
    async with host(tmp_path, "a") as a, fleet_of(launch, a, ec_store=url) as fleet:
        with capture_logs() as lines:
            await known(a)
            assert await items_of(fleet, request(image(b"1"))) == {"encoded": 1}
        assert [line["next"] for line in lines if "excludes" in line["event"]] == [
            "requests bypass it; --ec-store allows shm+tls:// alone"
        ]


async def test_an_address_that_is_no_url_ends_no_poll_and_no_registration(
    launch: Launch, tmp_path: Path
) -> None:
    registers: dict[str, Any] = {"dynamic_registration": True, "admin_api_key": "k" * 16}
    async with host(tmp_path, "a") as a, fleet_of(launch, a, decode=2, **registers) as fleet:
        labels = 'address="shm+tcp://[fd00::1",arena="ab",engine="0",tier=""'
        fleet.decode[1].metrics = page(f"# HELP\nvllm:ec_store_host_info{{{labels}}} 1.0\n")
        body, headers = {"role": "encode", "url": "http://127.0.0.1:1"}, {"X-API-Key": "k" * 16}
        with capture_logs() as lines:
            await known(a)
            registering = fleet.http.post(f"{fleet.url}/instances", json=body, headers=headers)
            async with registering as reply:
                assert reply.status == 200
        assert [line for line in lines if line["log_level"] == "error"] == []


def test_hosts_are_not_learned_without_metrics() -> None:
    with pytest.raises(ValidationError, match="--load-interval-s"):
        epd.ProxyConfig(
            encode_servers_urls="http://e:1",
            decode_servers_urls="http://d:1",
            ec_store="shm+tcp://",
            load_interval_s=0,
        )


@pytest.mark.fault(154)
@pytest.mark.parametrize("named", ["nothing", "another memory", "a server that is excluded"])
async def test_a_server_that_encodes_gets_the_media_once_whatever_it_names(
    launch: Launch, tmp_path: Path, named: str
) -> None:
    scheme = "shm+tls" if named == "a server that is excluded" else "shm+tcp"
    config = {"policies": "encode_local", "ec_store": f"{scheme}://?timeout=20s", "encode": 0}
    async with (
        two_hosts(tmp_path) as (a, b),
        fleet_of(launch, on_encode_failure="fail", decode=2, **config) as fleet,
    ):
        for each, decode in zip((a, b), fleet.decode, strict=True):
            each.writes = True
            each.arena = "ab" * 16 if named == "another memory" else None
            each.nameless = named == "nothing"
            each.has(decode)
            decode.chat = decodes
        await known(a, b)

        assert await items_of(fleet, request(image(b"1"))) == {"local": 1}
        assert sum(calls(fleet.decode)) == 1
        assert not fleet.events.requests[-1].degraded


@pytest.mark.fault(155)
async def test_decode_that_prefills_gets_the_media_without_another_encode(
    launch: Launch, tmp_path: Path
) -> None:
    config = {"encode": 2, "prefill": 2, "decode": 1}
    async with two_hosts(tmp_path) as (a, b), fleet_of(launch, **config) as fleet:
        for number, each in enumerate((a, b)):
            each.has(fleet.encode[number])
            fleet.prefill[number].metrics = each.metrics
            fleet.prefill[number].chat = refuses(500, "Internal server error")
        await known(a, b)
        before = len(fleet.prefill[0].calls) + len(fleet.prefill[1].calls)

        async with fleet.post(request(image(b"1"))) as reply:
            assert reply.status == 200
        tries = len(fleet.prefill[0].calls) + len(fleet.prefill[1].calls) - before
        assert sum(calls(fleet.encode)) <= tries


@pytest.mark.fault(155)
async def test_a_consumer_in_reach_is_preferred_to_one_without_a_server(
    launch: Launch, tmp_path: Path
) -> None:
    async with (
        host(tmp_path, "a") as a,
        fleet_of(launch, a, decode=2, on_encode_failure="fail") as fleet,
    ):
        fleet.decode[1].chat = decodes
        await known(a)
        for number in range(6):
            assert await items_of(fleet, request(image(b"%d" % number))) == {"encoded": 1}

        assert calls(fleet.decode) == [6, 0]


async def test_claims_on_a_host_end_when_the_consumer_of_a_retry_is_on_another(
    launch: Launch, tmp_path: Path
) -> None:
    config = {"policies": "encode_local", "encode": 0, "decode": 2}
    gate = asyncio.Event()
    chat = fails_first(1, refuses(503), after(gate, decodes))
    async with two_hosts(tmp_path) as hosts, fleet_of(launch, **config) as fleet:
        for each, decode in zip(hosts, fleet.decode, strict=True):
            each.writes = True
            each.has(decode)
            decode.chat = chat
        await known(*hosts)
        asked = asyncio.create_task(items_of(fleet, request(image(b"1"))))
        await until(lambda: calls(fleet.decode) == [1, 1])
        key = EntryKey(NAMESPACE, fleet.d.calls[0].parts[0]["uuid"])

        def claimed() -> list[bool]:
            claims = [each.store.claim([key], "asks", 60)[0] for each in hosts]
            for each in hosts:
                each.store.release([key], "asks")
            return claims

        [failed] = [stage.instance for stage in fleet.events.stages if stage.error]
        free = [decode.url == failed for decode in fleet.decode]
        await until(lambda: claimed() == free)
        gate.set()
        assert await asked == {"local": 1}
