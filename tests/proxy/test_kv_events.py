"""KV events of fake instances, over real ZeroMQ sockets: what the proxy knows of their caches."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

import epd
from epd.check import unusable_files
from epd.kv_events.markers import read_marker
from epd.routing.instances import Role
from epd.server.app_keys import TABLE
from tests.requests import image, request, text
from tests.support.fake_instance import FakeInstance
from tests.support.fleet import Fleet, Launch, until
from tests.support.kv_publisher import (
    CLEARED,
    SIZE,
    KVPublisher,
    publishers,
    removed,
    stored,
)
from tests.support.programs import INSTANCES, serving
from tests.support.registration import ADMIN, KEY, empty, listing, register, taking_part

LONG = "word " * 400
"""Text of two links, of 256 and 250 tokens."""

CONTENT: dict[str, Any] = {"decode_balance": "content", "kv_events": True}


@dataclass
class Pair:
    """An instance that publishes events."""

    instance: FakeInstance
    publisher: KVPublisher

    @property
    def mark(self) -> str:
        return self.instance.calls[-1].headers["X-Session-ID"]

    def store_prompt(self) -> list[int]:
        """Publish that the engine has stored the blocks of its last prompt. Return their hashes."""
        mark = self.mark
        prompt = read_marker(mark)
        blocks = [prompt.links[-1] ^ place for place in range(prompt.tokens // SIZE)]
        self.publisher.publish(stored(blocks, mark=mark))
        return blocks


@asynccontextmanager
async def following(launch: Launch, count: int = 2) -> AsyncIterator[tuple[Fleet, list[Pair]]]:
    """Run a proxy that follows this number of instances."""
    async with AsyncExitStack() as stack:
        started = stack.enter_context(publishers(count))
        fleet = await stack.enter_async_context(empty(launch, **CONTENT))
        pairs = []
        for one in started:
            taking = taking_part(fleet, Role.PREFILL_DECODE, kv_events=one.address)
            pairs.append(Pair(await stack.enter_async_context(taking), one))
        for one in started:
            await until(partial(has_subscribers, one, 1))
        yield fleet, pairs


def has_subscribers(one: KVPublisher, count: int) -> bool:
    return one.subscribers == count


async def asked(fleet: Fleet, pairs: Sequence[Pair], *words: str, **more: Any) -> Pair:
    """Send a request. Return the instance that has served it."""
    before = [len(one.instance.calls) for one in pairs]
    messages = [{"role": "user", "content": f"{word} {LONG}"} for word in words]
    status, answer = await fleet.chat({**request(text()), "messages": messages, **more})
    assert status == 200, answer
    [found] = [
        one for one, calls in zip(pairs, before, strict=True) if len(one.instance.calls) > calls
    ]
    return found


async def shown(fleet: Fleet) -> dict[str, str]:
    """Return how the proxy knows the cache of each instance."""
    return {one["url"]: one["prefix_cache"] for one in (await listing(fleet))["instances"]}


def matched(fleet: Fleet, one: Pair, mark: str) -> int:
    """Return how many links of a prompt the proxy expects in the cache of an instance."""
    table = fleet.runner.app[TABLE]
    [candidate] = [
        it for it in table.all(Role.PREFILL_DECODE) if it.instance.url == one.instance.url
    ]
    return candidate.load.cache.match(read_marker(mark))


async def figures(fleet: Fleet, name: str, **labels: str) -> float:
    async with fleet.http.get(f"{fleet.url}/metrics", headers=ADMIN) as reply:
        lines = (await reply.text()).splitlines()
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    found = [one for one in lines if one.startswith(f"{name}{{") and all(w in one for w in wanted)]
    return sum(float(one.split()[-1]) for one in found)


async def test_the_content_balance_follows_stored_and_removed_blocks(launch: Launch) -> None:
    async with following(launch) as (fleet, pairs):
        home = await asked(fleet, pairs, "a")
        blocks = home.store_prompt()
        mark = home.mark
        await until(lambda: fleet.runner.app[TABLE].load(_instance(fleet, home)).precise)
        assert matched(fleet, home, mark) == len(read_marker(mark).links)
        assert await asked(fleet, pairs, "a") is home

        home.publisher.publish(removed(*blocks[20:]))
        await until(lambda: matched(fleet, home, mark) < len(read_marker(mark).links))
        assert matched(fleet, home, mark) == 1
        home.publisher.publish(removed(*blocks))
        await until(lambda: not matched(fleet, home, mark))

        assert (await shown(fleet))[home.instance.url] == "precise"


def _instance(fleet: Fleet, one: Pair) -> Any:
    table = fleet.runner.app[TABLE]
    return table.find_instance(one.instance.url, Role.PREFILL_DECODE)


async def test_a_proxy_learns_from_events_where_another_has_sent_a_prompt(launch: Launch) -> None:
    async with following(launch, 3) as (fleet, pairs):
        homes, marks = {}, {}
        for word in "abcdef":
            homes[word] = await asked(fleet, pairs, word)
            marks[word] = homes[word].mark
        async with empty(launch, **CONTENT) as other:
            for one in pairs:
                body = {"role": "prefill_decode", "url": one.instance.url}
                status, _ = await register(other, body | {"kv_events": one.publisher.address})
                assert status == 200
                await until(partial(has_subscribers, one.publisher, 2))
            away = {word: pairs[pairs.index(home) - 1] for word, home in homes.items()}
            for word, one in away.items():
                blocks = [hash((word, place)) % 2**64 for place in range(100)]
                one.publisher.publish(stored(blocks, mark=marks[word]))
                await until(partial(matched, other, one, marks[word]))

            for word, one in away.items():
                assert await asked(other, pairs, word) is one


@pytest.mark.fault(86)
async def test_a_restart_a_gap_and_a_lost_connection_are_counted_and_end(launch: Launch) -> None:
    async with following(launch, 1) as (fleet, [one]):
        await asked(fleet, [one], "a")
        mark = one.mark
        links = len(read_marker(mark).links)

        async def faults(reason: str) -> float:
            return await figures(fleet, "epd_kv_event_faults_total", reason=reason)

        async def precise() -> None:
            one.store_prompt()
            await until(lambda: fleet.runner.app[TABLE].load(_instance(fleet, one)).precise)
            assert await figures(fleet, "epd_prefix_cache_precise") == 1

        await precise()
        one.publisher.publish_raw(b"", sent=False)
        one.publisher.publish()
        await until(lambda: not fleet.runner.app[TABLE].load(_instance(fleet, one)).precise)
        assert await faults("gap") == 1
        assert matched(fleet, one, mark) == links  # an estimate

        await precise()
        one.publisher.send_frames(b"no batch")
        await until(lambda: not fleet.runner.app[TABLE].load(_instance(fleet, one)).precise)
        assert await faults("malformed") == 1
        assert (await shown(fleet)) == {one.instance.url: "estimated"}

        await precise()
        one.publisher.__exit__()
        await until(lambda: not fleet.runner.app[TABLE].load(_instance(fleet, one)).precise)
        assert await faults("disconnected") == 1
        assert matched(fleet, one, mark) == links

        one.publisher.__enter__()
        await until(lambda: one.publisher.subscribers)
        one.publisher.publish(CLEARED)
        await until(lambda: not matched(fleet, one, mark))
        assert await faults("restarted") == 1
        assert await figures(fleet, "epd_kv_events_total", event="cleared") == 1
        await precise()
        assert matched(fleet, one, mark) == links


@pytest.mark.fault(86)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_sigterm_ends_a_process_that_follows_events(workers: str) -> None:
    with KVPublisher() as publisher:
        flags = ["--decode-balance", "content", "--kv-events", "--workers", workers]
        with serving(*INSTANCES, *flags, "--kv-events-addrs", publisher.address) as (_, process):
            while publisher.subscribers < int(workers):
                time.sleep(0.01)
            process.terminate()

            assert process.wait(20) == 0


async def test_an_address_that_zeromq_refuses_costs_only_its_instance(launch: Launch) -> None:
    async def counted(name: str, url: str) -> None:
        async with asyncio.timeout(20):
            while not await figures(fleet, name, instance=url):  # noqa: ASYNC110 - a scrape
                await asyncio.sleep(0.02)

    async with following(launch, count=1) as (fleet, [good]):
        address = "tcp://-h:5557"
        async with taking_part(fleet, Role.PREFILL_DECODE, kv_events=address) as bad:
            await counted("epd_kv_event_faults_total", bad.url)
            good.publisher.publish(stored([7]))
            await counted("epd_kv_events_total", good.instance.url)
        assert await figures(fleet, "epd_background_failures_total", task="kv_events") == 0


async def test_a_removed_instance_is_not_followed(launch: Launch) -> None:
    async with following(launch, 2) as (fleet, pairs):
        await asked(fleet, pairs, "a")
        url = pairs[0].instance.url
        async with fleet.http.delete(
            f"{fleet.url}/instances", params={"url": url}, headers=ADMIN
        ) as reply:
            assert reply.status == 200
        await until(lambda: not pairs[0].publisher.subscribers)
        pairs[0].publisher.publish(stored([1]))

        assert await figures(fleet, "epd_kv_events_total", instance=url) == 0


@pytest.mark.parametrize("session", [None, "a client's", "epd1.AAAA"])
async def test_the_mark_replaces_the_session_of_a_request(
    launch: Launch, session: str | None
) -> None:
    more = {} if session is None else {"session_id": session}
    headers = {} if session is None else {"X-Session-ID": session}
    async with launch(decode=2, **CONTENT) as fleet:
        body = {**request(image(), text()), **more}
        assert (await fleet.chat(body, headers))[0] == 200
        [call] = [call for one in fleet.decode for call in one.calls]

        prompt = read_marker(call.headers["X-Session-ID"])
        assert len(prompt.links) == 2
        assert call.body.get("session_id") == (session and call.headers["X-Session-ID"])
        assert all("epd1" not in str(one.headers) for one in fleet.encode[0].calls if not session)


async def test_prefill_and_decode_get_one_mark(launch: Launch) -> None:
    config: dict[str, Any] = {"prefill_balance": "content", "kv_events": True}
    async with launch(prefill=1, decode=1, **config) as fleet:
        assert (await fleet.chat(request(text(LONG))))[0] == 200
        marks = {one.calls[0].headers["X-Session-ID"] for one in (fleet.p, fleet.d)}

        assert len(marks) == 1
        assert len(read_marker(marks.pop()).links) == 2


def config(**more: Any) -> epd.ProxyConfig:
    return epd.ProxyConfig(encode_servers_urls=(), decode_servers_urls=("http://d:1",), **more)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_events": True}, "--kv-events needs --prefill-balance or --decode-balance content"),
        ({"kv_events_addrs": "tcp://a:1"}, "--kv-events-addrs needs --kv-events"),
        ({**CONTENT, "kv_events_addrs": "tcp://a"}, "not an address such as tcp://host:5557"),
        ({**CONTENT, "kv_events_addrs": "tcp://a:1,tcp://b:1"}, "two addresses without a URL"),
        ({**CONTENT, "kv_events_addrs": "http://a:1=tcp://a:1,http://a:1=tcp://b:1"}, "twice"),
    ],
)
def test_settings_that_cannot_work_are_rejected(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config(**settings)


def test_a_missing_library_is_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*unusable_files(config(**CONTENT))] == []

    monkeypatch.setitem(sys.modules, "zmq", None)
    [said] = unusable_files(config(**CONTENT))
    assert "pip install 'epd-proxy[kv-events]'" in said
    assert [*unusable_files(config(decode_balance="content"))] == []


async def test_a_registered_address_must_be_of_an_allowed_host(launch: Launch) -> None:
    async with empty(launch, registration_hosts=("127.0.0.1",), admin_api_key=KEY) as fleet:
        body = {"role": "decode", "url": "http://127.0.0.1:1"}
        for address, status in {
            "tcp://10.0.0.1:5557": 403,
            "ipc:///a/path": 403,
            "nonsense": 422,
            "tcp://127.0.0.1:5557": 200,
            "tcp://*:5557": 200,
        }.items():
            assert (await register(fleet, body | {"kv_events": address}))[0] == status
