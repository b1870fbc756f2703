"""What test_http.py shows, on uvloop, whose transports are its own, as `epd serve` runs."""

import asyncio
import json

import pytest

from tests.faults.processes import INSTANCES, serving
from tests.faults.raw import answer, connected, ended, post
from tests.faults.test_http import LONG_HEAD, NOT_HTTP, START, chat, floods, send_all
from tests.proxy.fake_instance import FakeInstance, chunk, encodes
from tests.proxy.fleet import until


@pytest.mark.fault(57)
async def test_what_is_no_request_is_a_400_and_the_end() -> None:
    with serving(*INSTANCES) as (url, _):
        for sent in NOT_HTTP.values():
            async with connected(url) as (reader, writer):
                writer.write(sent)

                assert (await answer(reader)).error["slug"] == "invalid_http"
                assert await ended(reader)


@pytest.mark.fault(57, 47, 49)
async def test_answers_to_those_who_are_still_sending_arrive() -> None:
    with serving(*INSTANCES, "--header-timeout-s", "1", "--max-body-bytes", "10000") as (url, _):
        for sent, status in ((LONG_HEAD, b"400"), (post(b"x" * 20_000_000), b"413")):
            said = await asyncio.to_thread(send_all, url, sent)
            assert said.split()[1] == status
        async with connected(url) as (reader, writer):
            writer.write(START)
            assert (await answer(reader)).status == 408
            assert await ended(reader)
        async with connected(url) as (reader, _):
            assert await ended(reader)


@pytest.mark.fault(46)
async def test_a_client_that_does_not_read_holds_decode_back_and_is_cut_off() -> None:
    sent = [0]
    encode, decode = FakeInstance(encodes), FakeInstance(floods(chunk("x" * 10_000), sent))
    async with encode.running(), decode.running():
        flags = ["--encode-servers-urls", encode.url, "--decode-servers-urls", decode.url]
        with serving(*flags, "--write-timeout-s", "1") as (url, process):
            async with connected(url) as (_, writer):
                writer.write(post(chat(stream=True)))
                await until(lambda: decode.aborted, 60)
            process.terminate()
            assert process.stderr is not None
            lines = [json.loads(line) for line in process.stderr.read().splitlines()]

    assert sent[0] < 30_000_000
    [logged] = [line for line in lines if line["event"] == "request"]
    assert (logged["status"], logged["error"]) == (499, "client_stalled")
