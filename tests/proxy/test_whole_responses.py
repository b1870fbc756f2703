"""Responses with a complete body: framing, connections, large bodies."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

import pytest
from aiohttp import web

from epd.edge.drain import DRAIN
from epd.server.whole_response import WholeResponse
from tests.faults.client_bytes import chat
from tests.support.fake_instance import REPLY, STREAM
from tests.support.fleet import Launch, until
from tests.support.raw import answer, connected, ended, post

launch = Launch()

HTTP_1_0 = post(chat()).replace(b"HTTP/1.1", b"HTTP/1.0", 1)


async def test_a_response_has_length_date_and_the_body_of_decode() -> None:
    async with launch() as fleet, connected(fleet.url) as (reader, writer):
        writer.write(post(chat()))
        said = await answer(reader)

        assert (said.status, json.loads(said.body)) == (200, REPLY)
        assert said.headers["server"] == "epd"
        assert said.headers["content-type"].startswith("application/json")
        sent = parsedate_to_datetime(said.headers["date"])
        assert abs(datetime.now(UTC) - sent) < timedelta(minutes=1)
        assert "connection" not in said.headers


@pytest.mark.parametrize(
    ("sent", "version", "connection", "ends"),
    [
        (post(chat(), Connection="close"), "HTTP/1.1", "close", True),
        (HTTP_1_0, "HTTP/1.0", None, True),
        (
            HTTP_1_0.replace(b"\r\n", b"\r\nConnection: keep-alive\r\n", 1),
            "HTTP/1.0",
            "keep-alive",
            False,
        ),
    ],
    ids=["close", "HTTP/1.0", "HTTP/1.0 with keep-alive"],
)
async def test_a_response_states_whether_the_connection_stays_open(
    sent: bytes, version: str, connection: str | None, ends: bool
) -> None:
    async with launch() as fleet, connected(fleet.url) as (reader, writer):
        writer.write(sent)
        said = await answer(reader)

        assert (said.version, said.status) == (version, 200)
        assert said.headers.get("connection") == connection
        if ends:
            assert await ended(reader)
        else:
            writer.write(sent)
            assert (await answer(reader)).status == 200


@pytest.mark.parametrize("keep_alive", [b"", b"Connection: keep-alive\r\n"])
async def test_the_end_of_a_stream_to_an_http_1_0_client_is_that_of_its_connection(
    keep_alive: bytes,
) -> None:
    sent = post(chat(stream=True)).replace(b"HTTP/1.1\r\n", b"HTTP/1.0\r\n" + keep_alive, 1)
    async with launch(keep_alive_s=60.0) as fleet, connected(fleet.url) as (reader, writer):
        writer.write(sent)
        async with asyncio.timeout(20):
            said = await reader.read()

        head, _, events = said.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.0 200 ")
        assert b"keep-alive" not in head.lower()
        assert events == b"".join(STREAM)


async def test_a_response_during_the_drain_closes_the_connection() -> None:
    async with launch() as fleet, connected(fleet.url) as (reader, writer):
        fleet.runner.app[DRAIN].began = True
        writer.write(post(chat()))
        said = await answer(reader)

        assert (said.status, said.headers["connection"]) == (200, "close")
        assert await ended(reader)


async def test_a_disconnect_before_the_response_is_not_a_failure() -> None:
    async with launch() as fleet:
        asked, gone = asyncio.Event(), asyncio.Event()

        async def late(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
            asked.set()
            await gone.wait()
            return web.json_response(REPLY)

        fleet.d.chat = late
        async with connected(fleet.url) as (_, writer):
            writer.write(post(chat()))
            await asked.wait()
        gone.set()
        await until(lambda: fleet.events.requests)

        [event] = fleet.events.requests
        assert (event.status, event.error) == (499, "client_closed")


async def test_a_header_with_a_line_break_is_not_sent() -> None:
    class Open(asyncio.Transport):
        def is_closing(self) -> bool:
            return False

        def write(self, data: bytes) -> None:  # type: ignore[override]
            raise AssertionError(data)

    class Request:
        transport, version, keep_alive = Open(), (1, 1), True

    response = WholeResponse(b"{}", {"x-any": "a\r\nSet-Cookie: b"})
    with pytest.raises(ValueError, match="line break"):
        await response.prepare(Request())  # type: ignore[arg-type]
