"""Row 48: an instance that closes an idle connection just when the proxy reuses it."""

import asyncio
import socket

import pytest

from epd.http.connection import STALE_S
from tests.requests import request, text
from tests.support.fleet import Launch

launch = Launch()


class Closing:
    """Server that answers the first request of a connection, and ends the connection at the second.

    Attributes:
        answered: bytes sent before the end of the second: nothing, or a part of an answer.
        works_s: seconds between the second request and its end.
    """

    def __init__(
        self,
        answered: bytes = b"",
        *,
        reset: bool = False,
        always: bool = False,
        works_s: float = 0.0,
    ) -> None:
        self.answered = answered
        self.works_s = works_s
        self.reset = reset
        self.always = always
        self.connections = -1  # the probe's connection does not count
        self.requests = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        end = self.always
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"GET /health "):
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                    break  # a probe, on a connection of its own
                [length] = [
                    int(line.split(b":")[1])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length")
                ]
                await reader.readexactly(length)
                self.requests += 1
                if end:
                    await asyncio.sleep(self.works_s)
                    writer.write(self.answered)
                    await writer.drain()
                    break
                body = b'{"choices": []}'
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
                )
                end = True
        except asyncio.IncompleteReadError:
            pass
        if self.reset:
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            writer.transport.abort()
        writer.close()


async def _with_closing(instance: Closing, requests: int) -> list[int]:
    server = await asyncio.start_server(instance.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, launch(decode_servers_urls=(url,)) as fleet:
        return [(await fleet.chat(request(text())))[0] for _ in range(requests)]


@pytest.mark.fault(48)
@pytest.mark.parametrize("reset", [False, True])
async def test_a_connection_that_ends_when_it_is_used_again_is_replaced_unseen(reset: bool) -> None:
    instance = Closing(reset=reset)

    assert await _with_closing(instance, 4) == [200, 200, 200, 200]
    assert instance.connections == 4
    assert instance.requests == 6  # two of them twice


@pytest.mark.fault(48)
async def test_an_answer_that_has_begun_is_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Otherwise the request itself would be retried.
    monkeypatch.setattr("epd.request.recovery.MAX_DECODES", 1)
    instance = Closing(b"HTTP/1.1 200 OK\r\nX: ")

    assert await _with_closing(instance, 2) == [200, 502]
    assert instance.requests == 2


@pytest.mark.fault(48)
async def test_a_request_that_an_instance_works_on_before_it_dies_is_not_sent_again_unseen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("epd.request.recovery.MAX_DECODES", 1)
    instance = Closing(works_s=STALE_S + 0.5)

    assert await _with_closing(instance, 2) == [200, 502]
    assert instance.requests == 2


@pytest.mark.fault(48)
async def test_a_new_connection_that_ends_is_the_instances_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("epd.request.recovery.MAX_DECODES", 1)
    instance = Closing(always=True)

    assert await _with_closing(instance, 1) == [502]
    assert instance.connections == 1
