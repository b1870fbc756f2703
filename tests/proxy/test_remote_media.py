"""Remote media through the proxy: instances receive the media instead of the URL."""

import asyncio
from typing import Any

import orjson
import pytest
from aiohttp import web

from epd.server.app_keys import ADMISSION
from tests.requests import data_url, image, request, text
from tests.support.fake_instance import chunk, encodes_without_params, hangs, streams_then
from tests.support.fake_origin import ALLOWED, FakeOrigin
from tests.support.fleet import Launch, until

PARAM = "messages[0].content[1].image_url.url"


async def test_engines_fetch_by_default(launch: Launch, origin: FakeOrigin) -> None:
    async with launch() as fleet:
        fleet.e.chat = encodes_without_params
        await fleet.chat(request(image(origin.url)))

        assert fleet.e.calls[0].parts == [image(origin.url)]
        assert fleet.d.calls[0].parts == [image(origin.url)]
    assert origin.requests == []


@pytest.mark.parametrize("decode_media", ["metadata", "raw"])
async def test_instances_get_the_content_under_our_uuid(
    launch: Launch, origin: FakeOrigin, decode_media: str
) -> None:
    async with launch(**ALLOWED, decode_media=decode_media) as fleet:
        remote = image(f"{origin.url}/a.png", uuid="mine")
        remote["image_url"]["detail"] = "low"
        await fleet.chat(request(text(), remote, image(b"picture")))

        # The same picture by URL and inline: one key, one encode.
        [sent] = [call.parts[0] for call in fleet.e.calls]
        assert sent["image_url"]["url"] == data_url(b"picture")
        _, *parts = fleet.d.calls[0].parts
        assert [part["uuid"] for part in parts] == [sent["uuid"]] * 2
        assert sent["uuid"] != "mine"
        kind = "image_embeds" if decode_media == "metadata" else "image_url"
        assert [part["type"] for part in fleet.d.calls[0].parts] == ["text", kind, kind]
        assert origin.url not in str(fleet.d.calls[0].body)


async def test_a_request_with_one_url_many_times_is_one_download(
    launch: Launch, origin: FakeOrigin
) -> None:
    async with launch(**ALLOWED) as fleet:
        status, _ = await fleet.chat(request(*[image(origin.url)] * 5))

        assert status == 200
    assert origin.sent == 1


async def test_files_stay_the_engines(
    launch: Launch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("media")
    (folder / "a.png").write_bytes(b"picture")
    url = (folder / "a.png").as_uri()
    async with launch(**ALLOWED, allowed_local_media_path=folder) as fleet:
        await fleet.chat(request(image(url)))

        assert fleet.e.calls[0].parts == [image(url)]


async def test_fetched_media_are_counted_like_a_body_until_decode_has_answered(
    launch: Launch, origin: FakeOrigin
) -> None:
    origin.content = b"x" * 60_000  # 80,000 bytes as base64
    asked = request(image(origin.url), stream=True)
    async with launch(**ALLOWED, max_inflight_bytes=100_000, decode_media="raw") as fleet:
        assert (await fleet.chat(request(*[image(origin.url)] * 2)))[0] == 400  # can never fit
        fleet.d.chat = streams_then(chunk("a"), then=hangs)
        async with fleet.post(asked) as first, fleet.post(asked) as second:
            assert (first.status, second.status) == (200, 200)
        fleet.d.chat = hangs
        hanging = asyncio.create_task(fleet.chat(asked))
        try:
            await until(lambda: len(fleet.d.calls) == 3)
            assert (await fleet.chat(asked))[0] == 503
        finally:
            hanging.cancel()


async def test_a_download_is_counted_while_it_arrives(launch: Launch, origin: FakeOrigin) -> None:
    end = asyncio.Event()

    async def begins(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "image/png"})
        await stream.prepare(request)
        await stream.write(b"x" * 36_000)  # 48,000 bytes as base64
        await end.wait()
        return stream

    origin.answer = begins
    async with launch(**ALLOWED, max_inflight_bytes=100_000) as fleet:
        admission = fleet.runner.app[ADMISSION]
        urls = [image(f"{origin.url}/{name}") for name in "abc"]
        both = [asyncio.create_task(fleet.chat(request(url))) for url in urls[:2]]
        await until(lambda: admission.body_bytes > 96_000)
        assert (await fleet.chat(request(urls[2])))[0] == 503

        end.set()
        assert [status for status, _ in await asyncio.gather(*both)] == [200, 200]
        await until(lambda: admission.body_bytes == 0)


@pytest.mark.fault(59)
async def test_a_download_reserves_twice_what_has_arrived_of_it(
    launch: Launch, origin: FakeOrigin
) -> None:
    """An origin that announces bodies and does not send them keeps no client out."""
    half, end = asyncio.Event(), asyncio.Event()

    async def begins(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "image/png"})
        stream.content_length = 60_000  # 80,000 bytes as base64
        await stream.prepare(request)
        await stream.write(b"x")
        await half.wait()
        await stream.write(b"x" * 29_999)
        await end.wait()
        await stream.write(b"x" * 30_000)
        return stream

    origin.answer = begins
    async with launch(**ALLOWED, max_inflight_bytes=100_000) as fleet:
        admission = fleet.runner.app[ADMISSION]
        first = asyncio.create_task(fleet.chat(request(image(f"{origin.url}/a"))))
        await until(lambda: origin.requests and admission.body_bytes)
        assert (await fleet.chat(request(text("x" * 90_000))))[0] == 200
        half.set()
        await until(lambda: 80_000 <= admission.body_bytes < 90_000)
        assert (await fleet.chat(request(image(f"{origin.url}/b"))))[0] == 503

        end.set()
        assert (await first)[0] == 200
        await until(lambda: admission.body_bytes == 0)


async def test_fetched_media_are_not_parsed_or_written_with_the_body(
    launch: Launch, origin: FakeOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin.content, longest, dumps = b"x" * 60_000, 0, orjson.dumps

    def measured(value: Any, *args: Any, **more: Any) -> bytes:
        nonlocal longest
        written = dumps(value, *args, **more)
        longest = max(longest, len(written))
        return written

    async with launch(**ALLOWED, decode_media="raw") as fleet:
        monkeypatch.setattr(orjson, "dumps", measured)
        inline = data_url(b"y" * 60_000)
        status, _ = await fleet.chat(request(image(origin.url), image(inline), text()))

        assert status == 200
        urls = {call.parts[0]["image_url"]["url"] for call in fleet.e.calls}
        assert urls == {data_url(origin.content), inline}
        sent = [part["image_url"]["url"] for part in fleet.d.calls[0].parts[:2]]
        assert sent == [data_url(origin.content), inline]
    assert 0 < longest < 60_000


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://169.254.169.254/latest/", (400, "media_not_allowed")),
        ("{origin}/404", (422, "media_fetch_failed")),
    ],
)
async def test_errors_name_the_item_and_reach_no_instance(
    launch: Launch, origin: FakeOrigin, url: str, expected: tuple[int, str]
) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=404)

    origin.answer = answer
    url = url.format(origin=origin.url) + "?token=secret"
    async with launch(**ALLOWED) as fleet:
        async with fleet.post(request(text(), image(url))) as reply:
            error = (await reply.json())["error"]

            assert expected == (reply.status, reply.headers["x-epd-error"])
            assert (expected[0], PARAM) == (error["code"], error["param"])
        assert fleet.e.calls == fleet.d.calls == []
        [event] = fleet.events.requests
        assert expected[1] == event.error
        assert "secret" not in f"{event}{error}"


async def test_waiters_for_one_download_each_get_their_own_param(
    launch: Launch, origin: FakeOrigin, joined: list[object]
) -> None:
    go = asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        await go.wait()
        return web.Response(status=404)

    origin.answer = answer
    async with launch(**ALLOWED) as fleet:
        bodies = (request(*[text()] * n, image(origin.url)) for n in range(4))
        tasks = [asyncio.create_task(fleet.chat(body)) for body in bodies]
        await until(lambda: len(joined) == 4)
        go.set()
        replies = await asyncio.gather(*tasks)

    assert [reply["error"]["param"] for _, reply in replies] == [
        f"messages[0].content[{n}].image_url.url" for n in range(4)
    ]
    assert len(origin.requests) == 1


async def test_all_media_of_a_request_are_no_larger_than_a_body_may_be(
    launch: Launch, origin: FakeOrigin
) -> None:
    origin.content = b"x" * 900
    async with launch(**ALLOWED, max_body_bytes=4096) as fleet:
        assert (await fleet.chat(request(*[image(origin.url)] * 3)))[0] == 200
        async with fleet.post(request(*[image(origin.url)] * 4)) as reply:
            assert (reply.status, reply.headers["x-epd-error"]) == (400, "media_too_large")
