"""Responses of instances that are late, endless, or cut at any byte."""

import asyncio
import gc
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from epd.server import middlewares
from tests.faults.scripted import (
    LAST_CHUNK,
    STREAM_HEAD,
    Scripted,
    answer,
    chunked,
    close,
    hold,
    read_request,
    reset,
    send,
    send_endlessly,
    send_slowly,
    wait,
)
from tests.requests import image, request, text
from tests.support.fake_instance import STREAM, FakeInstance, chunk, decodes
from tests.support.fleet import Launch, until
from tests.support.relay import End, Relay

DONE = b"data: [DONE]\n\n"
EVENTS = [
    "data: é漢🙂\n\n".encode(),
    b"data: 1\r\n\r\n",
    b"data: 1\r\r",
    b": comment\n\n",
    b"event: x\r\ndata: 1\r\ndata: 2\r\n\r\n",
    b"data: a\ndata: b\n\n",
]


async def refused(launch: Launch, encoder: Scripted, **config: Any) -> tuple[int, str]:
    """Return status and error of a picture request if the only encode instance follows a script."""
    urls = (encoder.url,)
    async with (
        launch(encode_servers_urls=urls, on_encode_failure="fail", **config) as fleet,
        fleet.post(request(image())) as reply,
    ):
        assert fleet.d.calls == []
        return reply.status, reply.headers["x-epd-error"]


@pytest.mark.fault(9)
async def test_an_answer_that_comes_a_byte_at_a_time_is_not_waited_for(launch: Launch) -> None:
    script = [read_request(), send_slowly(answer(b" " * 1000), 0.05)]
    async with Scripted(script).running() as encoder:
        asked = refused(launch, encoder, encode_timeout_s=0.5)

        assert await asyncio.wait_for(asked, 20) == (504, "encode_timeout")
        await until(lambda: encoder.aborted)


@pytest.mark.fault(10)
@pytest.mark.parametrize("head", [answer(b"", length=2**30), STREAM_HEAD])
async def test_little_of_a_huge_answer_is_read(launch: Launch, head: bytes) -> None:
    piece = chunked(b" " * 2**16) if head == STREAM_HEAD else b" " * 2**16
    async with Scripted([read_request(), send(head), send_endlessly(piece)]).running() as encoder:
        assert await refused(launch, encoder) == (502, "encode_bad_response")
        await until(lambda: encoder.aborted)


@pytest.mark.fault(8)
async def test_an_answer_with_a_malformed_chunk_is_not_waited_for(launch: Launch) -> None:
    script = [read_request(), send(STREAM_HEAD + chunked(b"{")), wait(0.1), send(b"zz\r\n"), hold()]
    async with Scripted(script).running() as encoder:
        status, _ = await refused(launch, encoder)

        assert status == 502  # and not 504


async def test_a_reset_idle_connection_is_not_logged(
    launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    script = [read_request(), send(answer(b'{"choices": []}')), wait(0.1), reset()]
    async with Scripted(script).running() as decode:
        async with launch(decode_servers_urls=(decode.url,)) as fleet:
            assert (await fleet.chat(request(text())))[0] == 200
            await until(lambda: decode.exchanges[0].done)
            await asyncio.sleep(0.1)
        gc.collect()

        assert "never retrieved" not in caplog.text


@pytest.mark.fault(36)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_rejection_by_decode_reaches_the_client_unchanged(
    launch: Launch, stream: bool
) -> None:
    said = b'{"error": { "message":"no", "type":"BadRequestError", "param":null, "code":422 }}'
    async with Scripted([read_request(), send(answer(said, 422)), hold()]).running() as decode:
        async with (
            launch(decode_servers_urls=(decode.url,)) as fleet,
            fleet.post(request(text(), stream=stream)) as reply,
        ):
            assert (reply.status, await reply.read()) == (422, said)
        assert len(decode.exchanges) == 1


async def test_a_client_that_leaves_before_the_error_of_its_stream_has_left(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def leaves(*_: object) -> web.StreamResponse:
        raise ConnectionResetError("the client has left")

    monkeypatch.setattr(middlewares, "end_broken_response", leaves)
    event = STREAM_HEAD + chunked(chunk("a"))
    async with (
        Scripted([read_request(), send(event), wait(0.1), reset()]).running() as decode,
        launch(decode_servers_urls=(decode.url,)) as fleet,
    ):
        with pytest.raises(aiohttp.ClientError):
            async with fleet.post(request(text(), stream=True)) as reply:
                await reply.read()
        await until(lambda: fleet.events.requests)

        [done] = fleet.events.requests
        assert (done.status, done.error, done.reason) == (499, "client_closed", None)


BROKEN: dict[str, Any] = {
    "reset": (reset(), "decode_died"),
    "closed": (close(), "decode_died"),
    "bad chunk": (send(b"zz\r\n"), "decode_died"),
    "silent": (hold(), "decode_stalled"),
    "ended": (send(LAST_CHUNK), "decode_truncated"),
}


@pytest.mark.fault(37)
@pytest.mark.fault(38)
@pytest.mark.fault(39)
@pytest.mark.parametrize("how", BROKEN)
async def test_a_stream_that_breaks_is_ended_by_an_error_and_not_begun_again(
    launch: Launch, how: str
) -> None:
    step, slug = BROKEN[how]
    begun = send(STREAM_HEAD + chunked(chunk("a"), b'data: {"half'))
    # A broken chunk or a RST that follows at once may overtake the chunk before it.
    async with Scripted([read_request(), begun, wait(0.1), step]).running() as decode:
        async with (
            launch(decode_servers_urls=(decode.url,), idle_timeout_s=0.3) as fleet,
            fleet.post(request(text(), stream=True)) as reply,
        ):
            content = await reply.read()
        assert content.startswith(chunk("a") + b'data: {"error":')
        assert content.endswith(b"}\n\n")
        assert b"[DONE]" not in content
        assert b"half" not in content
        assert [done.error for done in fleet.events.requests] == [slug]
        assert len(decode.exchanges) == 1


@pytest.mark.fault(37)
@pytest.mark.parametrize("prefills", [0, 1])
@pytest.mark.parametrize("how", ["reset", "closed"])
async def test_decode_that_dies_between_its_head_and_its_first_byte_is_replaced(
    launch: Launch, how: str, prefills: int
) -> None:
    step, _ = BROKEN[how]
    script = [read_request(), send(STREAM_HEAD), wait(0.1), step]
    async with Scripted(script).running() as dies, FakeInstance(decodes).running() as decode:
        urls = (dies.url, decode.url)
        config: dict[str, Any] = {"decode_servers_urls": urls, "decode_balance": "round_robin"}
        async with launch(prefill=prefills, **config) as fleet:
            for _ in range(2):
                async with fleet.post(request(text(), stream=True)) as reply:
                    assert reply.status == 200
                    assert (await reply.read()).endswith(DONE)

            assert len(dies.exchanges) == 1
            assert [done.retries for done in fleet.events.requests].count(1) == 1
            assert {done.error for done in fleet.events.requests} == {None}


WHOLE = b'{"choices": []}'


@pytest.mark.fault(37)
@pytest.mark.parametrize("prefills", [0, 1])
@pytest.mark.parametrize("how", ["reset", "closed"])
async def test_an_answer_without_a_stream_that_breaks_off_is_asked_of_another_instance(
    launch: Launch, how: str, prefills: int
) -> None:
    step, _ = BROKEN[how]
    script = [read_request(), send(answer(WHOLE[:5], length=len(WHOLE))), wait(0.1), step]
    async with Scripted(script).running() as dies, FakeInstance(decodes).running() as decode:
        urls = (dies.url, decode.url)
        config: dict[str, Any] = {"decode_servers_urls": urls, "decode_balance": "round_robin"}
        async with launch(prefill=prefills, **config) as fleet:
            for _ in range(2):
                assert (await fleet.chat(request(text())))[0] == 200

            assert len(dies.exchanges) == 1
            assert [done.retries for done in fleet.events.requests].count(1) == 1
            assert {done.error for done in fleet.events.requests} == {None}


@pytest.mark.fault(37)
async def test_an_answer_that_breaks_off_everywhere_goes_to_two_instances(launch: Launch) -> None:
    script = [read_request(), send(answer(WHOLE[:5], length=len(WHOLE))), wait(0.1), reset()]
    async with (
        Scripted(script).running() as first,
        Scripted(script).running() as second,
        Scripted(script).running() as third,
    ):
        urls = (first.url, second.url, third.url)
        async with (
            launch(decode_servers_urls=urls) as fleet,
            fleet.post(request(text())) as reply,
        ):
            assert (reply.status, reply.headers["x-epd-error"]) == (502, "decode_died")
        assert sum(len(one.exchanges) for one in (first, second, third)) == 2


@pytest.mark.fault(38)
async def test_an_answer_without_a_stream_that_falls_silent_is_not_asked_for_again(
    launch: Launch,
) -> None:
    script = [read_request(), send(answer(WHOLE[:5], length=len(WHOLE))), hold()]
    async with Scripted(script).running() as silent, FakeInstance(decodes).running() as decode:
        urls = (silent.url, decode.url)
        async with launch(decode_servers_urls=urls, idle_timeout_s=0.3) as fleet:
            slugs = set()
            for _ in range(2):
                async with fleet.post(request(text())) as reply:
                    slugs.add((reply.status, reply.headers.get("x-epd-error")))
            assert slugs <= {(200, None), (504, "decode_stalled")}
            await until(lambda: silent.aborted == len(silent.exchanges))


@pytest.mark.fault(38)
async def test_a_decode_silent_after_its_head_is_an_error_with_a_status(
    launch: Launch,
) -> None:
    async with Scripted([read_request(), send(STREAM_HEAD), hold()]).running() as decode:
        async with (
            launch(decode_servers_urls=(decode.url,), idle_timeout_s=0.3) as fleet,
            fleet.post(request(text(), stream=True)) as reply,
        ):
            assert (reply.status, reply.headers["x-epd-error"]) == (504, "decode_stalled")
        assert len(decode.exchanges) == 1
        await until(lambda: decode.aborted)


@pytest.mark.fault(37)
@pytest.mark.parametrize("end", ["close", "reset", "half_close"])
async def test_wherever_the_network_cuts_a_stream_it_ends_in_an_error_and_never_as_if_whole(
    launch: Launch, end: End
) -> None:
    whole = b"".join(STREAM)
    script = [read_request(), send(STREAM_HEAD + chunked(*STREAM) + LAST_CHUNK), hold()]
    async with Scripted(script).running() as decode, Relay(decode.listener).running() as relay:
        relay.answers.end = end
        urls = (relay.url(scheme="http"),)
        async with launch(decode_servers_urls=urls) as fleet:
            # From the first byte after the head to the byte before the end of `[DONE]`.
            first = len(STREAM_HEAD) + len(b"%x\r\n" % len(STREAM[0])) + 1
            for cut in range(len(STREAM_HEAD) + 1, len(STREAM_HEAD + chunked(*STREAM)) - 3, 23):
                relay.answers.cut_after = cut
                async with fleet.post(request(text(), stream=True)) as reply:
                    content = await reply.read()
                if reply.status == 502 and (end == "reset" or cut < first):
                    continue  # RST overtook the head, or no byte of the body came
                assert reply.status == 200
                events, _, error = content.partition(b'data: {"error":')
                assert whole.startswith(events)
                assert error
                assert b"[DONE]" not in content


@pytest.mark.fault(41)
async def test_a_stream_cut_at_any_byte_arrives_byte_for_byte(launch: Launch) -> None:
    stream = b"".join([*EVENTS, DONE])
    scripts = [
        [
            read_request(),
            send(STREAM_HEAD + chunked(stream[:cut])),
            send(chunked(stream[cut:]) + LAST_CHUNK),
            hold(),
        ]
        for cut in range(1, len(stream))
    ]
    async with Scripted(*scripts).running() as decode:
        async with launch(decode_servers_urls=(decode.url,)) as fleet:
            for _ in scripts:
                async with fleet.post(request(text(), stream=True)) as reply:
                    assert await reply.read() == stream
        assert len(decode.exchanges) == len(scripts)
