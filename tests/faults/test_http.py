"""HTTP of clients: ambiguous, endless, slow or interrupted."""

import asyncio
import gzip
import json
import random
from contextlib import suppress
from typing import Any

import pytest
from aiohttp import web

from epd.server import intake
from tests.faults.client_bytes import LONG_HEAD, NOT_HTTP, SECRET, START, chat, send_all
from tests.requests import image, request, text
from tests.support.fake_instance import after, decodes
from tests.support.fleet import Fleet, Launch, until
from tests.support.raw import answer, connected, ended, post

launch = Launch()


def slugs(fleet: Fleet) -> list[tuple[int, str | None]]:
    return [(event.status, event.error) for event in fleet.events.requests]


# Bytes that are not a request, or that another parser might read as other requests.


@pytest.mark.fault(57)
@pytest.mark.security("S19")
@pytest.mark.parametrize("sent", NOT_HTTP.values(), ids=NOT_HTTP)
async def test_an_ambiguous_request_gets_a_400_and_the_connection_ends(sent: bytes) -> None:
    async with launch() as fleet, connected(fleet.url) as (reader, writer):
        writer.write(sent)
        said = await answer(reader)

        assert (said.status, said.error["slug"]) == (400, "invalid_http")
        assert await ended(reader)
        assert SECRET not in f"{said} {fleet.events}"
        assert slugs(fleet) == [(400, "invalid_http")]
        assert fleet.d.calls == []


@pytest.mark.fault(57)
async def test_bytes_after_a_bad_request_are_not_a_request() -> None:
    async with launch() as fleet, connected(fleet.url) as (reader, writer):
        writer.write(NOT_HTTP["length and chunked"] + post(chat()))
        await answer(reader)
        writer.write(post(chat()))

        assert await ended(reader)
        assert fleet.d.calls == []


@pytest.mark.fault(57)
async def test_bad_requests_wait_for_those_before_them() -> None:
    async with launch() as fleet, connected(fleet.url) as (reader, writer):
        answers = asyncio.Event()

        fleet.d.chat = after(answers, decodes)
        writer.write(post(chat()))
        await until(lambda: fleet.d.calls)
        writer.write(NOT_HTTP["two lengths"])
        await asyncio.sleep(0.1)
        answers.set()

        assert (await answer(reader)).status == 200
        assert (await answer(reader)).status == 400


@pytest.mark.fault(49)
async def test_the_answer_to_a_head_that_is_too_large_can_be_read() -> None:
    """Closing with unread bytes would reset the connection, and the answer would be lost."""
    async with launch() as fleet:
        said = await asyncio.to_thread(send_all, fleet.url, LONG_HEAD)

        assert said.startswith(b"HTTP/1.0 431 ")


def head(headers: dict[str, str], target: str = "/v1/chat/completions") -> bytes:
    """Return a request with these headers."""
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    start, body = f"POST {target} HTTP/1.1\r\n", json.dumps(request(text())).encode()
    own = f"Host: epd\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return (start + own + "".join(lines) + "\r\n").encode() + body


MANY = {f"X-{number}": "1" for number in range(256 - 3)}
LARGE = [
    head({"Cookie": "a" * 200_000}),
    head({"Authorization": "Bearer " + "a" * 65_536}),
    head({}, "/v1/chat/completions?a=" + "b" * 65_536),
    head(MANY),
    head(dict.fromkeys(MANY, "a" * 800)),
]


@pytest.mark.fault(49)
@pytest.mark.parametrize("sent", LARGE, ids=["cookie", "token", "target", "many", "much"])
@pytest.mark.parametrize("pieces", [1, 7])
async def test_large_heads_are_accepted(sent: bytes, pieces: int) -> None:
    async with launch() as fleet, connected(fleet.url) as (reader, writer):
        size = len(sent) // pieces + 1
        for _ in range(2):  # the next request of a connection too
            for start in range(0, len(sent), size):
                writer.write(sent[start : start + size])
                await writer.drain()
                await asyncio.sleep(0)
            assert (await answer(reader)).status == 200

        assert len(fleet.d.calls) == 2


TOO_LARGE = {
    "cookie": (head({"A": "b", "Cookie": SECRET * 40_000, "C": "d" * 1000}), "the header Cookie"),
    "target": (head({}, f"/{SECRET}" * 40_000), "the request line"),
    "sum": (head({f"X-{number}": SECRET * 200 for number in range(200)}), "the header X-"),
    "endless": (b"POST / HTTP/1.1\r\nCookie: " + SECRET.encode() * 40_000, "the header Cookie"),
    "count": (head({**MANY, "One-More": SECRET}), "more than 256 headers"),
}


@pytest.mark.fault(49)
@pytest.mark.security("S19")
@pytest.mark.parametrize(("sent", "named"), TOO_LARGE.values(), ids=TOO_LARGE)
@pytest.mark.parametrize("pieces", [1, 7])
async def test_head_above_a_limit_gets_a_431_that_names_it(
    sent: bytes, named: str, pieces: int
) -> None:
    async with launch() as fleet, connected(fleet.url) as (reader, writer):
        size = len(sent) // pieces + 1
        for start in range(0, len(sent), size):
            writer.write(sent[start : start + size])
            await asyncio.sleep(0)
        said = await answer(reader)

        assert (said.status, said.error["slug"]) == (431, "head_too_large")
        assert named in said.error["message"]
        assert "262144 bytes" in said.error["message"] or "256" in named
        assert await ended(reader)
        assert SECRET not in f"{said} {fleet.events}"
        assert slugs(fleet) == [(431, "head_too_large")]
        assert fleet.d.calls == []


@pytest.mark.fault(49)
async def test_large_body_is_no_part_of_the_head() -> None:
    body = json.dumps(request(text("a" * 1_000_000))).encode()
    async with launch() as fleet, connected(fleet.url) as (reader, writer):
        for _ in range(2):
            writer.write(post(body))
            assert (await answer(reader)).status == 200


@pytest.mark.fault(57)
async def test_a_body_that_stops_being_chunked_is_refused_at_once() -> None:
    async with launch() as fleet, connected(fleet.url) as (reader, writer):
        writer.write(START + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n")
        await asyncio.sleep(0.1)
        writer.write(b"zz\r\n")
        said = await answer(reader)

        assert (said.status, said.error["slug"]) == (400, "invalid_body")
        assert fleet.d.calls == []


@pytest.mark.fault(57)
async def test_damaged_requests_end_in_our_errors_or_in_answers() -> None:
    """The requests have bytes inserted, removed or doubled; none may cause a 500 or hang."""
    whole = [*NOT_HTTP.values(), post(chat()), post(chat(stream=True))]
    dice = random.Random(57)  # noqa: S311 - the same sequence at each run
    async with launch(header_timeout_s=0.5, body_timeout_s=0.5, keep_alive_s=0.5) as fleet:

        async def send(sent: bytes) -> None:
            async with connected(fleet.url) as (reader, writer):
                writer.write(sent)
                said = b""
                # The proxy may close the connection with unread bytes, which resets it.
                with suppress(ConnectionResetError):
                    async with asyncio.timeout(60):
                        said = await reader.read()
            assert said == b"" or said.startswith(b"HTTP/")
            assert SECRET.encode() not in said

        await asyncio.gather(*(send(_damaged(dice.choice(whole), dice)) for _ in range(300)))

        assert {status for status, _ in slugs(fleet)} <= {
            200,
            400,
            404,
            405,
            408,
            413,
            415,
            417,
            431,
        }
        assert (await fleet.chat(request(text())))[0] == 200


def _damaged(sent: bytes, dice: random.Random) -> bytes:
    damaged = bytearray(sent)
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(len(damaged))
        damaged[at : at + dice.randint(0, 2)] = dice.choice(
            [
                b"",
                b"\r",
                b"\n",
                b"\r\n",
                b"\0",
                b":",
                b" ",
                b"\xff",
                b"0",
                bytes(damaged[at : at + 8]),
            ]
        )
    return bytes(damaged)


@pytest.mark.fault(57)
@pytest.mark.security("S19")
@pytest.mark.parametrize("path", ["/health", "/v1/chat/completions", "/nothing"])
@pytest.mark.parametrize("expected", [SECRET, f"100-continue, {SECRET}"])
async def test_an_unknown_expectation_gets_a_417(path: str, expected: str) -> None:
    async with launch() as fleet, connected(fleet.url) as (reader, writer):
        writer.write(post(chat(), path, Expect=expected))
        said = await answer(reader)

        assert (said.status, said.error["slug"]) == (417, "unsupported_expectation")
        assert said.headers["server"] == "epd"
        assert await ended(reader)
        assert SECRET not in f"{said} {fleet.events}"
        assert slugs(fleet) == [(417, "unsupported_expectation")]
        assert fleet.d.calls == []


ROUTELESS = {
    "POST /nothing": 404,
    "PUT /v1/media/one": 405,
    "GET /v1/chat/completions": 405,
    "DELETE /v1/media/one": 503,  # no store is configured
    "POST /": 405,
}


@pytest.mark.fault(57)
@pytest.mark.parametrize("asked", ROUTELESS)
async def test_the_proxy_does_not_request_a_body_that_it_will_not_read(asked: str) -> None:
    async with launch() as fleet, connected(fleet.url) as (reader, writer):
        sent = post(1000, asked.partition(" ")[2], Expect="100-continue")
        writer.write(sent.replace(b"POST", asked.partition(" ")[0].encode(), 1))
        said = await answer(reader)

        assert said.status == ROUTELESS[asked]
        assert said.headers.get("allow") == {
            "PUT /v1/media/one": "delete",
            "GET /v1/chat/completions": "post",
            "POST /": "get, head",
        }.get(asked)
        paths = [event.path for event in fleet.events.requests]
        routes = {"/v1/media/one": "/v1/media/{uuid}", "/nothing": "unknown"}
        path = asked.partition(" ")[2]
        assert paths == [routes.get(path, path)]


@pytest.mark.fault(57)
@pytest.mark.security("S19")
@pytest.mark.parametrize("target", ["http://other", "http://epd:8000", "http://a@epd", "HTTP://x"])
async def test_a_target_on_another_host_than_the_host_header_is_a_400(target: str) -> None:
    """Checks of `Host`, such as the one for local clients, would look at the wrong host."""
    async with launch() as fleet, connected(fleet.url) as (reader, writer):
        writer.write(post(chat(), f"{target}/v1/chat/completions"))
        said = await answer(reader)

        assert (said.status, said.error["slug"]) == (400, "invalid_http")
        assert slugs(fleet) == [(400, "invalid_http")]


@pytest.mark.fault(57)
@pytest.mark.parametrize("target", ["http://epd", "HTTP://EPD"])
async def test_a_target_on_the_host_that_the_header_names_is_served(target: str) -> None:
    async with launch() as fleet, connected(fleet.url) as (reader, writer):
        writer.write(post(chat(), f"{target}/v1/chat/completions"))

        assert (await answer(reader)).status == 200


# Slow clients


@pytest.mark.fault(47)
@pytest.mark.parametrize("first", [b"", post(chat())], ids=["first request", "second request"])
async def test_a_head_that_does_not_end_is_a_408(first: bytes) -> None:
    async with launch(header_timeout_s=0.3) as fleet, connected(fleet.url) as (reader, writer):
        writer.write(first)
        if first:
            assert (await answer(reader)).status == 200
        writer.write(START)
        for _ in range(4):  # byte by byte, never idle
            await asyncio.sleep(0.05)
            writer.write(b"X")
        said = await answer(reader)

        assert (said.status, said.error["slug"]) == (408, "header_timeout")
        assert said.error["type"] == "RequestTimeoutError"
        assert await ended(reader)
        assert slugs(fleet)[-1] == (408, "header_timeout")
        refused = fleet.events.requests[-1]
        assert repr(refused.status) == "408"  # and not an enum's name, in logs
        assert refused.engine_id == refused.request_id


@pytest.mark.fault(47)
async def test_a_silent_client_is_disconnected_without_a_response() -> None:
    async with launch(header_timeout_s=0.2) as fleet, connected(fleet.url) as (reader, _):
        assert await ended(reader)
        assert fleet.events.requests == []


@pytest.mark.fault(47)
async def test_an_idle_connection_has_longer_than_a_head() -> None:
    async with launch(header_timeout_s=0.2, keep_alive_s=2) as fleet:
        async with connected(fleet.url) as (reader, writer):
            for _ in range(2):
                writer.write(post(chat()))
                assert (await answer(reader)).status == 200
                await asyncio.sleep(0.4)

            assert await ended(reader)
        assert slugs(fleet) == [(200, None)] * 2


@pytest.mark.fault(47)
async def test_half_a_head_behind_a_request_does_not_harm_it() -> None:
    async with launch(header_timeout_s=0.2) as fleet, connected(fleet.url) as (reader, writer):

        async def slowly(got: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await asyncio.sleep(0.6)
            return await decodes(got, body)

        fleet.d.chat = slowly
        writer.write(post(chat()))
        await until(lambda: fleet.d.calls)
        writer.write(START)

        assert (await answer(reader)).status == 200
        assert (await answer(reader)).status == 408


@pytest.mark.fault(47)
@pytest.mark.parametrize("trailing", [b"", b"\r\n"], ids=["nothing", "an empty line"])
async def test_the_end_of_a_body_does_not_begin_a_head(trailing: bytes) -> None:
    """Clients send a large body in separate packets; some send an empty line after it."""
    body = chat()
    async with launch(header_timeout_s=0.2) as fleet, connected(fleet.url) as (reader, writer):

        async def slowly(got: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await asyncio.sleep(0.6)
            return await decodes(got, body)

        fleet.d.chat = slowly
        for _ in range(2):
            for part in (post(len(body)), body[:10], body[10:], trailing):
                writer.write(part)
                await asyncio.sleep(0.05)
            assert (await answer(reader)).status == 200
            await asyncio.sleep(0.3)

    assert slugs(fleet) == [(200, None)] * 2


@pytest.mark.fault(47)
async def test_a_request_behind_a_declined_upgrade_is_not_a_begun_head() -> None:
    async with launch(header_timeout_s=0.2) as fleet, connected(fleet.url) as (reader, writer):

        async def slowly(got: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await asyncio.sleep(0.2)
            return await decodes(got, body)

        fleet.d.chat = slowly
        writer.write(post(chat(), Connection="Upgrade", Upgrade="h2c"))
        await until(lambda: fleet.d.calls)
        writer.write(post(chat()))
        for _ in range(2):
            assert (await answer(reader)).status == 200
        await asyncio.sleep(0.4)
        writer.write(post(chat()))

        assert (await answer(reader)).status == 200


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge the rate of a body soon after its start."""
    monkeypatch.setattr(intake, "GRACE_S", 0.3)


@pytest.mark.fault(47)
@pytest.mark.usefixtures("short_grace")
async def test_a_body_that_comes_too_slowly_is_a_408() -> None:
    async with launch() as fleet:
        async with connected(fleet.url) as (reader, writer):
            writer.write(post(1_000_000))
            sending = asyncio.create_task(_send(writer, b"x" * 100, pause_s=0.05))
            said = await answer(reader)
            sending.cancel()

            assert (said.status, said.error["slug"]) == (408, "body_timeout")
            assert said.headers["connection"] == "close"
        assert slugs(fleet) == [(408, "body_timeout")]


@pytest.mark.fault(47)
@pytest.mark.usefixtures("short_grace")
async def test_a_body_that_comes_fast_enough_is_served() -> None:
    body = chat(padding="x" * 800_000)
    async with launch() as fleet, connected(fleet.url) as (reader, writer):
        writer.write(post(len(body)))
        for start in range(0, len(body), 100_000):  # a megabyte a second, for 0.8 s
            writer.write(body[start : start + 100_000])
            await asyncio.sleep(0.1)

        assert (await answer(reader)).status == 200


async def _send(writer: asyncio.StreamWriter, part: bytes, pause_s: float) -> None:
    while True:
        writer.write(part)
        await asyncio.sleep(pause_s)


@pytest.mark.fault(46)
@pytest.mark.parametrize("closed", [False, True], ids=["keep-alive", "close"])
async def test_a_client_that_does_not_read_a_whole_answer_is_cut_off(closed: bool) -> None:
    async def answers(_: web.Request, __: dict[str, Any]) -> web.Response:
        return web.json_response({"choices": ["x" * 40_000_000]})

    async with launch(write_timeout_s=0.5) as fleet:
        fleet.d.chat = answers
        server = fleet.runner.server
        assert server is not None
        async with connected(fleet.url) as (reader, writer):
            if closed:  # the rest fits into the buffer, and close waits until it is read
                await until(lambda: server.connections)
                [connection] = server.connections
                assert connection.transport is not None
                connection.transport.set_write_buffer_limits(high=10**9)
            writer.write(post(chat(), Connection="close" if closed else "keep-alive"))
            await until(lambda: fleet.events.requests)
            await asyncio.sleep(1)  # the proxy has written the answer and given up sending
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await answer(reader)


# Too large bodies


@pytest.mark.fault(49)
@pytest.mark.security("S10")
async def test_a_body_with_a_too_large_length_is_not_read() -> None:
    async with launch(max_body_bytes=10_000) as fleet, connected(fleet.url) as (reader, writer):
        writer.write(post(10_001))  # only the head
        said = await answer(reader)

        assert (said.status, said.error["slug"]) == (413, "body_too_large")
        assert said.headers["connection"] == "close"
        assert await ended(reader, 4)  # at once, although the proxy may read the rest for longer


@pytest.mark.fault(49)
async def test_a_client_that_waits_for_continue_gets_413_before_its_body() -> None:
    async with launch(max_body_bytes=10_000) as fleet, connected(fleet.url) as (reader, writer):
        writer.write(post(10_001, Expect="100-continue"))

        assert (await answer(reader)).status == 413


@pytest.mark.fault(49)
async def test_a_chunked_body_is_read_up_to_the_limit() -> None:
    async with launch(max_body_bytes=10_000) as fleet, connected(fleet.url) as (reader, writer):
        writer.write(START + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(11):
            writer.write(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
        said = await answer(reader)  # no last chunk has been sent

        assert (said.status, said.error["slug"]) == (413, "body_too_large")
        assert fleet.d.calls == []


@pytest.mark.fault(49)
async def test_a_client_that_sends_it_all_before_it_reads_gets_the_answer() -> None:
    async with launch(max_body_bytes=10_000) as fleet:
        said = await asyncio.to_thread(send_all, fleet.url, post(b"x" * 40_000_000))

        assert said.startswith(b"HTTP/1.1 413 ")


@pytest.mark.fault(49)
@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "x-gzip", "gzip, gzip"])
async def test_an_encoded_body_is_refused_and_not_unpacked(coding: str) -> None:
    bomb = gzip.compress(b"x" * 10_000_000)
    async with launch() as fleet, connected(fleet.url) as (reader, writer):
        writer.write(post(bomb, Content_Encoding=coding))
        said = await answer(reader)

        assert (said.status, said.error["slug"]) == (415, "unsupported_encoding")
        assert fleet.d.calls == []


# Headers


@pytest.mark.fault(55)
@pytest.mark.security("S5")
async def test_instances_get_no_header_but_those_that_are_named() -> None:
    async with launch(prefill=1) as fleet:
        sent = {
            "Authorization": "Bearer key",
            "traceparent": "00-1-2-01",
            "tracestate": "a=b",
            "Connection": "keep-alive, x-hop",
            "x-hop": "1",
            "Keep-Alive": "timeout=5",
            "Proxy-Authorization": "Basic x",
            "TE": "trailers",
            "Trailer": "x",
            "Upgrade": "h2c",
            "Forwarded": "for=1.2.3.4",
            "X-Forwarded-For": "1.2.3.4",
            "x-data-parallel-rank": "1",
            "x-prefiller-host-port": "evil:1",
            "x-epd-stage": "decode",
            "Cookie": "c=1",
            "x-api-key": "key",
        }
        async with fleet.post(request(image()), sent) as reply:
            assert reply.status == 200

        for instance in (fleet.e, fleet.p, fleet.d):
            assert {name.lower() for name in instance.calls[0].headers} == {
                *("host", "user-agent", "accept", "accept-encoding", "content-length"),
                *("content-type", "authorization", "traceparent", "tracestate", "x-request-id"),
            }


@pytest.mark.fault(55)
@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("stream", [False, True])
async def test_clients_get_no_header_of_an_instance_but_the_content_type(
    stream: bool, status: int
) -> None:
    theirs = {
        "Connection": "x-hop",
        "x-hop": "1",
        "Keep-Alive": "timeout=5",
        "Set-Cookie": "c=1",
        "x-epd-error": "theirs",
        "x-epd-items": "theirs",
        "x-request-id": "theirs",
        "Server": "uvicorn",
        "Location": "http://inside",
        "Access-Control-Allow-Origin": "*",
    }

    async def answers(got: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream") or status != 200:
            return web.json_response({"choices": []}, headers=theirs, status=status)
        response = web.StreamResponse(headers=theirs | {"Content-Type": "text/event-stream"})
        await response.prepare(got)
        await response.write(b"data: [DONE]\n\n")
        return response

    async with launch() as fleet:
        fleet.d.chat = answers
        async with fleet.post(request(text(), stream=stream)) as reply:
            got = {name.lower(): value for name, value in reply.headers.items()}

    ours = {"content-type", "content-length", "transfer-encoding", "cache-control", "date"}
    assert reply.status == status
    assert set(got) <= ours | {
        "server",
        "server-timing",
        "x-request-id",
        "x-epd-stage",
        "x-epd-error",
    }
    assert "theirs" not in got.values()
    assert got["server"] == "epd"
