"""Overload: rows 59 and 60, and the limits per tenant (S24)."""

import asyncio
import json
import re
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from tests.requests import request, text
from tests.support.clients import ALICE, BOB, bearer
from tests.support.fake_instance import FakeInstance, decodes, encodes
from tests.support.fleet import Fleet, Launch, until
from tests.support.programs import serving
from tests.support.raw import connected, post

MIB = 1024**2
NOTHING = {
    "epd_requests_in_flight": 0.0,
    "epd_requests_queued": 0.0,
    "epd_body_bytes_in_flight": 0.0,
}


class Gate:
    """Handler that decodes when the test opens it."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, asked: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await self.open.wait()
        return await decodes(asked, body)


@asynccontextmanager
async def busy(launch: Launch, **config: Any) -> AsyncIterator[tuple[Fleet, Gate]]:
    """Run a fleet with a gate at its decode instance; at the end, nothing may be in progress."""
    async with launch(**config) as fleet:
        fleet.d.chat = gate = Gate()
        try:
            yield fleet, gate
        finally:
            gate.open.set()
        await shows(fleet, **NOTHING)


async def figures(fleet: Fleet) -> dict[str, float]:
    async with fleet.http.get(f"{fleet.url}/metrics", headers=bearer(ALICE)) as reply:
        families = text_string_to_metric_families(await reply.text())
    found = {}
    for sample in (sample for family in families for sample in family.samples):
        name = sample.labels.get("reason", sample.name)
        found[name] = sample.value
    return found


async def shows(fleet: Fleet, **expected: float) -> None:
    """Wait until the metrics show these values."""
    async with asyncio.timeout(60):
        while not expected.items() <= (await figures(fleet)).items():  # noqa: ASYNC110 - the proxy sets no event
            await asyncio.sleep(0.01)


def named(words: str) -> dict[str, Any]:
    return request(text(words))


def sized(size: int) -> bytes:
    """Return a request of exactly this size."""
    empty = json.dumps(named("")).encode()
    return empty.replace(b'"text": ""', b'"text": "%s"' % (b"x" * (size - len(empty))))


Answer = tuple[int, dict[str, Any]]


def ask(fleet: Fleet, words: str, key: str = ALICE) -> asyncio.Task[Answer]:
    return asyncio.create_task(fleet.chat(named(words), bearer(key)))


def served(fleet: Fleet) -> list[str]:
    return [call.parts[0]["text"] for call in fleet.d.calls]


async def answer_to_head(fleet: Fleet, *headers: str) -> tuple[bytes, dict[bytes, bytes]]:
    """Return the answer to a request of which only the head is sent."""
    host, port = fleet.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = ["POST /v1/chat/completions HTTP/1.1", "Host: proxy", *headers]
    writer.write(("\r\n".join(head) + "\r\n\r\n").encode())
    async with asyncio.timeout(60):
        status, *fields = (await reader.readuntil(b"\r\n\r\n")).rstrip().split(b"\r\n")
    writer.close()
    await writer.wait_closed()
    return status.split()[1], dict(field.lower().split(b": ", 1) for field in fields)


@pytest.mark.fault(60)
async def test_above_the_queue_it_is_429_before_any_body(launch: Launch) -> None:
    async with busy(launch, max_requests=1, max_queue=1) as (fleet, gate):
        first = ask(fleet, "first")
        await until(lambda: fleet.d.calls)
        second = ask(fleet, "second")
        await shows(fleet, epd_requests_in_flight=1, epd_requests_queued=1)
        for announced in ("Content-Length: 30000000", "Transfer-Encoding: chunked"):
            status, headers = await answer_to_head(fleet, announced)

            assert status == b"429"
            assert headers[b"x-epd-error"] == b"queue_full"
            assert headers[b"x-epd-stage"] == b"proxy"
            assert headers[b"retry-after"] == b"1"
        async with fleet.http.get(f"{fleet.url}/health") as reply:
            assert reply.status == 200
        await shows(fleet, queue_full=2)
        gate.open.set()

        assert [(await task)[0] for task in (first, second)] == [200, 200]
        assert served(fleet) == ["first", "second"]


@pytest.mark.fault(60)
async def test_a_request_that_queues_too_long_is_503_and_its_body_is_not_read(
    launch: Launch,
) -> None:
    config = {"max_requests": 1, "queue_timeout_s": 0.05}
    async with busy(launch, **config) as (fleet, gate):
        first = ask(fleet, "first")
        await until(lambda: fleet.d.calls)
        status, headers = await answer_to_head(
            fleet, "Content-Length: 30000000", "Expect: 100-continue"
        )

        assert status == b"503"
        assert headers[b"x-epd-error"] == b"overloaded"
        assert headers[b"retry-after"] == b"1"
        assert headers[b"server-timing"].startswith(b"queue;dur=")
        gate.open.set()
        assert (await first)[0] == 200
        await shows(fleet, queue_timeout=1)


@pytest.mark.fault(60)
async def test_a_client_that_leaves_the_queue_gives_its_place_back(launch: Launch) -> None:
    async with busy(launch, max_requests=1, max_queue=1) as (fleet, gate):
        first = ask(fleet, "first")
        await until(lambda: fleet.d.calls)
        leaves = ask(fleet, "leaves")
        await shows(fleet, epd_requests_queued=1)
        leaves.cancel()
        await shows(fleet, epd_requests_queued=0)
        stays = ask(fleet, "stays")
        await shows(fleet, epd_requests_queued=1)
        gate.open.set()

        assert [(await task)[0] for task in (first, stays)] == [200, 200]
        assert served(fleet) == ["first", "stays"]


@pytest.mark.fault(60)
@pytest.mark.parametrize(("sent", "reset"), [(9, False), (3_000_000, True)])
async def test_a_client_that_disconnects_within_an_unread_body_leaves_the_queue(
    launch: Launch, sent: int, reset: bool
) -> None:
    async with busy(launch, max_requests=1, queue_timeout_s=60) as (fleet, gate):
        first = ask(fleet, "first")
        await until(lambda: fleet.d.calls)
        host, port = fleet.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 9000000\r\n\r\n"
        writer.write(head + b"x" * sent)
        await shows(fleet, epd_requests_queued=1)
        if reset:
            opened = writer.get_extra_info("socket")
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        await shows(fleet, epd_requests_queued=0)
        gate.open.set()

        assert (await first)[0] == 200
        assert [event.status for event in fleet.events.requests].count(499) == 1


@pytest.mark.fault(60)
async def test_openais_client_obeys_retry_after(launch: Launch) -> None:
    config = {"max_requests": 1, "max_queue": 0}
    async with (
        busy(launch, **config) as (fleet, gate),
        openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="k", max_retries=1) as client,
    ):
        first = ask(fleet, "first")
        await until(lambda: fleet.d.calls)
        clock = asyncio.get_running_loop().time
        asked_s = clock()
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        completion = asyncio.create_task(
            client.chat.completions.create(model="m", messages=messages)
        )
        await shows(fleet, queue_full=1)
        gate.open.set()

        assert (await completion).choices[0].message.content == "aé"
        assert clock() - asked_s >= 1  # its own first pause is half a second
        assert (await first)[0] == 200


@pytest.mark.fault(59)
@pytest.mark.parametrize("chunked", [False, True])
async def test_bodies_above_the_budget_are_503_and_the_others_served(
    launch: Launch, chunked: bool
) -> None:
    size = 3 * MIB

    async def pieces() -> AsyncIterator[bytes]:
        body = sized(size)
        for start in range(0, size, 65536):
            yield body[start : start + 65536]

    async def post() -> tuple[int, str | None, str | None]:
        data = pieces() if chunked else BytesIO(sized(size))
        headers = {"Content-Type": "application/json"}
        async with fleet.http.post(
            f"{fleet.url}/v1/chat/completions", data=data, headers=headers
        ) as reply:
            await reply.read()
            return reply.status, reply.headers.get("x-epd-error"), reply.headers.get("Retry-After")

    budget = {"max_body_bytes": 4 * MIB, "max_inflight_bytes": 8 * MIB}
    async with busy(launch, **budget) as (fleet, gate):
        first = [asyncio.create_task(post()) for _ in range(2)]
        await until(lambda: len(fleet.d.calls) == 2)
        await shows(fleet, epd_body_bytes_in_flight=2 * size)
        refused = await asyncio.gather(*(post() for _ in range(4)))
        small = ask(fleet, "small")
        await until(lambda: len(fleet.d.calls) == 3)
        gate.open.set()

        assert refused == [(503, "overloaded", "1")] * 4
        assert await asyncio.gather(*first) == [(200, None, None)] * 2
        assert (await small)[0] == 200
        await shows(fleet, body_bytes=4, **NOTHING)
        assert await post() == (200, None, None)


@pytest.mark.security("S24")
@pytest.mark.fault(59)
@pytest.mark.parametrize("with_keys", [False, True])
async def test_bodies_that_are_announced_and_not_sent_keep_no_client_out(
    launch: Launch, keys: Path, with_keys: bool
) -> None:
    budget: dict[str, Any] = {"max_body_bytes": 4 * MIB, "max_inflight_bytes": 8 * MIB}
    if with_keys:
        budget["api_keys_file"] = keys
    async with busy(launch, **budget) as (fleet, gate), AsyncExitStack() as stack:
        gate.open.set()
        for key in (ALICE, BOB) * 4:
            _, writer = await stack.enter_async_context(connected(fleet.url))
            writer.write(post(4 * MIB, Authorization=f"Bearer {key}"))
        await shows(fleet, epd_requests_in_flight=8, epd_body_bytes_in_flight=0)

        assert (await fleet.chat(named("x" * (3 * MIB)), bearer(BOB)))[0] == 200


@pytest.mark.fault(59)
async def test_bodies_that_together_exceed_the_budget_are_served_or_503_before_their_end(
    launch: Launch,
) -> None:
    body, pieces = sized(4 * MIB), 64
    budget = {"max_body_bytes": 4 * MIB, "max_inflight_bytes": 10 * MIB}
    async with busy(launch, **budget) as (fleet, gate), AsyncExitStack() as stack:
        gate.open.set()
        opened = [await stack.enter_async_context(connected(fleet.url)) for _ in range(6)]
        for _, writer in opened:
            writer.write(post(len(body)))
        for piece in range(pieces):
            for _, writer in opened:
                writer.write(body[piece * len(body) // pieces :][: len(body) // pieces])
            await asyncio.sleep(0)
        statuses = [(await reader.readline()).split()[1] for reader, _ in opened]

        assert set(statuses) == {b"200", b"503"}


@pytest.mark.fault(49, 59)
async def test_a_body_larger_than_the_whole_budget_is_413_at_once(launch: Launch) -> None:
    budget = {"max_requests": 1, "max_inflight_bytes": 64 * 1024}
    async with busy(launch, **budget) as (fleet, gate):
        first = ask(fleet, "first")
        await until(lambda: fleet.d.calls)
        status, headers = await answer_to_head(fleet, "Content-Length: 70000")

        assert status == b"413"
        assert headers[b"x-epd-error"] == b"body_too_large"
        assert b"retry-after" not in headers
        gate.open.set()
        assert (await first)[0] == 200


@pytest.mark.fault(59)
async def test_a_client_that_leaves_amid_its_body_gives_its_bytes_back(launch: Launch) -> None:
    async with busy(launch) as (fleet, _):
        host, port = fleet.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 99\r\n\r\n{"
        )
        await shows(fleet, epd_body_bytes_in_flight=2, epd_requests_in_flight=1)
        writer.close()
        await writer.wait_closed()
        await shows(fleet, **NOTHING)

        assert fleet.d.calls == []


@pytest.mark.security("S24")
async def test_a_tenant_has_so_many_requests_in_a_minute(launch: Launch, keys: Path) -> None:
    config = {"api_keys_file": keys, "tenant_requests_per_minute": 2}
    async with busy(launch, **config) as (fleet, gate):
        gate.open.set()
        for key in (ALICE, ALICE, BOB):
            assert (await ask(fleet, "hello", key))[0] == 200
        for path in ("chat/completions", "models"):
            send = fleet.http.get if path == "models" else fleet.http.post
            async with send(f"{fleet.url}/v1/{path}", headers=bearer(ALICE)) as reply:
                assert reply.status == 429
                assert reply.headers["x-epd-error"] == "rate_limited"
                assert 1 <= int(reply.headers["Retry-After"]) <= 30
                error = (await reply.json())["error"]
                assert (error["type"], error["code"]) == ("RateLimitError", 429)
        async with fleet.http.get(f"{fleet.url}/health", headers=bearer(ALICE)) as reply:
            assert reply.status == 200

        assert (await ask(fleet, "hello", BOB))[0] == 200
        await shows(fleet, tenant_rate=2)


@pytest.mark.security("S24")
async def test_a_tenant_has_so_many_requests_at_once(launch: Launch, keys: Path) -> None:
    config = {"api_keys_file": keys, "tenant_max_requests": 2, "max_requests": 1}
    async with busy(launch, **config) as (fleet, gate):
        tasks = [ask(fleet, "inside"), ask(fleet, "waits")]
        await shows(fleet, epd_requests_in_flight=1, epd_requests_queued=1)
        status, refused = await ask(fleet, "one too many")
        tasks.append(ask(fleet, "bob's", BOB))
        await shows(fleet, epd_requests_queued=2)
        gate.open.set()

        assert (status, refused["error"]["type"]) == (429, "RateLimitError")
        assert [(await task)[0] for task in tasks] == [200] * 3
        assert (await ask(fleet, "now"))[0] == 200
        await shows(fleet, tenant_requests=1)


@pytest.mark.security("S24")
@pytest.mark.fault(60)
async def test_a_tenant_cannot_keep_another_out_of_the_queue(launch: Launch, keys: Path) -> None:
    config = {"api_keys_file": keys, "max_requests": 1, "max_queue": 3}
    async with busy(launch, **config) as (fleet, gate):
        inside = ask(fleet, "inside")
        await until(lambda: fleet.d.calls)
        alice = []
        for number in range(3):
            alice.append(ask(fleet, f"alice {number}"))
            await shows(fleet, epd_requests_queued=number + 1)
        bob = ask(fleet, "bob", BOB)
        refused = await alice.pop()
        gate.open.set()

        assert (refused[0], refused[1]["error"]["code"]) == (429, 429)
        assert [(await task)[0] for task in (inside, bob, *alice)] == [200] * 4
        assert served(fleet) == ["inside", "alice 0", "bob", "alice 1"]


@pytest.mark.security("S24")
@pytest.mark.fault(59)
async def test_bodies_of_one_tenant_shut_no_other_out(launch: Launch, keys: Path) -> None:
    budget = {"max_body_bytes": 2 * MIB, "max_inflight_bytes": 8 * MIB}
    async with (
        busy(launch, api_keys_file=keys, **budget) as (fleet, gate),
        AsyncExitStack() as heads,
    ):
        head = post(2 * MIB, Authorization=f"Bearer {ALICE}")
        for _ in range(2):
            _, writer = await heads.enter_async_context(connected(fleet.url))
            writer.write(head + b"x" * MIB)  # from then on, the other half is reserved too
        await shows(fleet, epd_body_bytes_in_flight=4 * MIB)
        status, headers = await answer_to_head(
            fleet, f"Content-Length: {2 * MIB}", f"Authorization: Bearer {ALICE}"
        )
        assert (status, headers[b"x-epd-error"]) == (b"429", b"rate_limited")
        assert headers[b"retry-after"] == b"1"
        gate.open.set()

        assert (await ask(fleet, "bob", BOB))[0] == 200
        await shows(fleet, tenant_bytes=1, body_bytes=0)


@pytest.mark.security("S24")
async def test_requests_without_a_key_take_no_place_and_no_rate(launch: Launch, keys: Path) -> None:
    config = {
        "api_keys_file": keys,
        "max_requests": 1,
        "max_queue": 0,
        "tenant_requests_per_minute": 1,
    }
    async with busy(launch, **config) as (fleet, gate):
        for _ in range(5):
            status, _ = await answer_to_head(fleet, "Content-Length: 30000000")
            assert status == b"401"
        gate.open.set()

        assert (await ask(fleet, "hello"))[0] == 200
        shown = await figures(fleet)
        assert {shown[reason] for reason in ("tenant_rate", "queue_full", "body_bytes")} == {0}


def peak_bytes(pid: int) -> int:
    found = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.fault(59)
async def test_memory_is_bounded_for_many_concurrent_large_bodies() -> None:
    """Row 59 at a smaller scale: 40 bodies of 8 MB with a limit of 64 MB."""
    encode, decode = FakeInstance(encodes), FakeInstance(decodes)
    body = sized(8 * 10**6)
    flags = ["--max-inflight-bytes", str(64 * 10**6), "--max-body-bytes", str(16 * 10**6)]

    async def post(http: aiohttp.ClientSession, url: str) -> int:
        headers = {"Content-Type": "application/json"}
        async with http.post(
            f"{url}/v1/chat/completions", data=BytesIO(body), headers=headers
        ) as reply:
            await reply.read()
            return reply.status

    async with encode.running(), decode.running():
        flags += ["--encode-servers-urls", encode.url, "--decode-servers-urls", decode.url]
        with serving(*flags) as (url, process):
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as http:
                before = peak_bytes(process.pid)
                statuses = await asyncio.gather(*(post(http, url) for _ in range(40)))
                grown = peak_bytes(process.pid) - before
                assert await post(http, url) == 200

    assert set(statuses) == {200, 503}
    assert grown < 5 * 64 * 10**6  # all bodies together would be 320 MB before parsing
