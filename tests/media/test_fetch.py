"""Fetching of remote media from real servers."""

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from epd.config import ProxyConfig
from epd.errors import ProxyError
from epd.media.fetch import CONNECT_S, SILENT_S, MediaFetcher
from epd.media.memory_count import MemoryCount
from epd.media.slots import TENANT_SLOTS
from tests.requests import data_url
from tests.support.fake_origin import ALLOWED, FakeNames, FakeOrigin
from tests.support.fleet import until

PICTURE = data_url(b"picture")


class _Held(MemoryCount):
    def __init__(self, scope: str) -> None:
        self._scope = scope

    @property
    def scope(self) -> str:
        return self._scope


class Fetching:
    """Fetcher that returns media as whole `data:` URLs."""

    def __init__(self, fetcher: MediaFetcher) -> None:
        self._fetcher = fetcher

    async def fetch(self, url: str, modality: str, scope: str = "") -> str:
        media = await self._fetcher.fetch(url, modality, _Held(scope))
        return media.head + media.base64.decode()


@asynccontextmanager
async def fetching(
    names: FakeNames | None = None,
    *,
    connect_s: float = CONNECT_S,
    silent_s: float = SILENT_S,
    **more: object,
) -> AsyncIterator[Fetching]:
    config = {"encode_servers_urls": "http://e", "decode_servers_urls": "http://d"}
    live = ProxyConfig.model_validate(config | ALLOWED | more)
    async with MediaFetcher.open(live, names, connect_s=connect_s, silent_s=silent_s) as fetcher:
        yield Fetching(fetcher)


async def failure(fetched: Awaitable[str]) -> ProxyError:
    with pytest.raises(ProxyError) as error:
        await fetched
    return error.value


def redirects(*targets: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler that redirects path `/n` to target `n`; the last path has a picture."""

    async def answer(request: web.Request) -> web.Response:
        step = int(request.path.strip("/") or 0)
        if step < len(targets):
            return web.Response(status=302, headers={"Location": targets[step]})
        return web.Response(body=b"picture", content_type="image/png")

    return answer


# Requests and results


async def test_media_become_a_data_url_and_nothing_of_a_client_goes_out(
    origin: FakeOrigin,
) -> None:
    origin.headers["Set-Cookie"] = "a=b"
    async with fetching() as fetcher:
        assert await fetcher.fetch(f"{origin.url}/cat.png?sig=%2B#x", "image") == PICTURE
        await fetcher.fetch(f"{origin.url}/cat.png", "image")

    paths = [path for path, _ in origin.requests]
    assert paths == ["/cat.png?sig=%2B", "/cat.png"]
    for _, headers in origin.requests:
        assert set(headers) == {"Host", "Accept", "Accept-Encoding", "User-Agent"}
        assert headers["Accept"] == "image/*"


@pytest.mark.parametrize("size", [0, 1, 2, 3, 65535, 300001])
async def test_any_length_is_the_same_bytes(origin: FakeOrigin, size: int) -> None:
    origin.content = (bytes(range(256)) * 1200)[:size]
    async with fetching() as fetcher:
        assert await fetcher.fetch(origin.url, "image") == data_url(origin.content)


@pytest.mark.parametrize(
    ("said", "taken"),
    [
        ("Image/PNG; charset=x", "image/png"),
        ("video/mp4", "application/octet-stream"),
        ("text/html", "application/octet-stream"),
        ('image/x;base64,AAAA"', "image/x"),
        ("image/a,b", "application/octet-stream"),
        ("image/" + "x" * 200, "application/octet-stream"),
    ],
)
async def test_an_invalid_media_type_is_ignored(origin: FakeOrigin, said: str, taken: str) -> None:
    origin.headers["Content-Type"] = said
    async with fetching() as fetcher:
        assert await fetcher.fetch(origin.url, "image") == data_url(b"picture", taken)


# Targets


@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.2/",
        "http://169.254.169.254/latest/meta-data",
        "http://[::1]/",
        "http://evil.test/",
        "file:///etc/passwd",
        "http://user@127.0.0.1/",
        "//evil.test\\@127.0.0.1/",
    ],
)
async def test_redirects_are_checked_like_first_urls(origin: FakeOrigin, target: str) -> None:
    origin.answer = redirects(target)
    async with fetching() as fetcher:
        error = await failure(fetcher.fetch(f"{origin.url}/0", "image"))

    assert (error.status, error.slug) == (400, "media_not_allowed")
    assert len(origin.requests) == 1


async def test_three_redirects_are_followed_and_not_four(origin: FakeOrigin) -> None:
    origin.answer = redirects("1", f"{origin.url}/2", "/3", "/4")
    async with fetching() as fetcher:
        assert await fetcher.fetch(f"{origin.url}/1", "image") == PICTURE
        error = await failure(fetcher.fetch(f"{origin.url}/0", "image"))

    assert (error.status, error.slug) == (422, "media_fetch_failed")
    assert [path for path, _ in origin.requests][-4:] == ["/0", "/1", "/2", "/3"]


@pytest.mark.parametrize("address", ["10.0.0.1", "169.254.169.254", "::ffff:127.0.0.1", "::1"])
async def test_a_name_of_a_private_address_is_refused_as_one_that_does_not_exist(
    address: str,
) -> None:
    asked = []
    for answer in (address, socket.gaierror(socket.EAI_NONAME, "no such name")):
        names = FakeNames(answer)
        async with fetching(
            names, allow_private_media=False, allowed_media_domains="", allow_http_media=False
        ) as fetcher:
            error = await failure(fetcher.fetch("https://inside.test/secret", "image"))
        assert names.asked == ["inside.test"]
        asked.append((error.slug, error.body(), repr(error.__cause__)))

    assert asked[0] == asked[1]
    assert asked[0][0] == "media_not_allowed"
    assert address not in str(asked[0])


async def test_media_fetcher_connects_only_to_allowed_addresses(
    origin: FakeOrigin,
) -> None:
    names = FakeNames("169.254.169.254,127.0.0.1")
    async with fetching(names) as fetcher:
        found = await fetcher.fetch(f"http://media.test:{origin.port}/", "image")

    assert found == PICTURE


async def test_a_name_is_resolved_once_for_check_and_connection(origin: FakeOrigin) -> None:
    """A second lookup could return another address: DNS rebinding."""
    names = FakeNames("127.0.0.1", "169.254.169.254")
    origin.headers["Connection"] = "close"
    async with fetching(names) as fetcher:
        url = f"http://media.test:{origin.port}/"
        assert await fetcher.fetch(url, "image") == PICTURE
        assert names.asked == ["media.test"]

        error = await failure(fetcher.fetch(url, "image"))
        assert error.slug == "media_not_allowed"
        assert names.asked == ["media.test", "media.test"]


@pytest.mark.parametrize(
    ("answer", "slug", "said"),
    [
        (
            socket.gaierror(socket.EAI_AGAIN, "later"),
            "media_fetch_failed",
            "the name servers did not answer for the host's name",
        ),
        (
            socket.gaierror(socket.EAI_NONAME, "none"),
            "media_not_allowed",
            "the host's name does not exist",
        ),
        (
            "169.254.169.254",
            "media_not_allowed",
            "the host has no address that the media policy allows",
        ),
    ],
)
async def test_the_reason_why_a_listed_host_has_no_address_is_told(
    answer: str | OSError, slug: str, said: str
) -> None:
    async with fetching(FakeNames(answer)) as fetcher:
        error = await failure(fetcher.fetch("http://media.test/", "image"))

    assert error.slug == slug
    assert said in str(error)


async def test_a_refused_http_url_is_told_with_the_flag_that_allows_it() -> None:
    async with fetching(allow_http_media=False) as fetcher:
        error = await failure(fetcher.fetch("http://media.test/", "image"))

    assert error.slug == "media_not_allowed"
    assert "--allow-http-media" in str(error)


# Limits


async def hangs(_: web.Request) -> web.Response:
    await asyncio.sleep(60)
    raise AssertionError("the request was not cancelled")


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"x" * 4096)


async def says_large(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "4097"})
    await response.prepare(request)
    return await hangs(request)


@pytest.mark.parametrize("answer", [endless, says_large])
async def test_reading_of_media_ends_at_the_size_limit(
    origin: FakeOrigin, answer: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> None:
    origin.answer = answer
    async with fetching(max_media_bytes=4096) as fetcher:
        error = await failure(fetcher.fetch(origin.url, "image"))
        origin.answer, origin.content = None, b"x" * 4096
        await fetcher.fetch(origin.url, "image")

    assert (error.status, error.slug) == (400, "media_too_large")


async def test_an_encoded_answer_is_refused_before_it_is_decoded(origin: FakeOrigin) -> None:
    origin.content = gzip.compress(bytes(10**7))
    origin.headers["Content-Encoding"] = "gzip"
    async with fetching(max_media_bytes=10**6) as fetcher:
        error = await failure(fetcher.fetch(origin.url, "image"))

    assert (error.status, error.slug) == (422, "media_fetch_failed")


async def drips(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"x")
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("answer", [hangs, drips])
async def test_the_time_limit_is_for_the_whole(
    origin: FakeOrigin, answer: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> None:
    origin.answer = answer
    async with fetching(media_timeout_s=0.3) as fetcher:
        error = await failure(fetcher.fetch(origin.url, "image"))

    assert (error.status, error.slug) == (422, "media_fetch_failed")
    await until(lambda: origin.aborted == 1)


async def test_an_origin_that_stays_silent_is_not_waited_for_until_the_time_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        async with (
            fetching(connect_s=0.1, silent_s=0.1, media_timeout_s=1000) as fetcher,
            asyncio.timeout(20),
        ):
            for scheme in ("http", "https"):
                error = await failure(fetcher.fetch(f"{scheme}://127.0.0.1:{port}/", "image"))
                assert (error.status, error.slug) == (422, "media_fetch_failed")
                assert "did not answer in time" in str(error)


async def test_the_wait_for_a_slot_does_not_count_as_time_of_the_origin(
    origin: FakeOrigin,
) -> None:
    async def slow(_: web.Request) -> web.Response:
        await asyncio.sleep(1.2)
        return web.Response(body=b"picture", content_type="image/png")

    origin.answer = slow
    async with fetching(media_timeout_s=2) as fetcher:
        urls = [f"{origin.url}/{number}" for number in range(TENANT_SLOTS + 1)]
        fetched = await asyncio.gather(*(fetcher.fetch(url, "image") for url in urls))

    assert fetched == [PICTURE] * (TENANT_SLOTS + 1)


@pytest.mark.parametrize("status", [404, 401, 429, 500, 206, 302, 304])
async def test_an_origins_errors_are_failed_fetches(origin: FakeOrigin, status: int) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status)

    origin.answer = answer
    async with fetching() as fetcher:
        error = await failure(fetcher.fetch(f"{origin.url}/?secret", "image"))

    assert (error.status, error.slug) == (422, "media_fetch_failed")


async def breaks_off(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "100"})
    await response.prepare(request)
    await response.write(b"x")
    assert request.transport is not None
    request.transport.abort()
    return response


async def no_http(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.write(b"hello\r\n\r\n")
    await asyncio.sleep(0.05)
    request.transport.abort()
    return web.Response()


@pytest.mark.parametrize("answer", [breaks_off, no_http])
async def test_a_broken_origin_is_a_failed_fetch_without_its_url(
    origin: FakeOrigin, answer: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> None:
    origin.answer = answer
    async with fetching() as fetcher:
        error = await failure(fetcher.fetch(f"{origin.url}/?secret", "image"))

    assert (error.status, error.slug) == (422, "media_fetch_failed")
    assert "secret" not in f"{error!r} {error.__cause__!r}"


async def test_an_unreachable_origin_is_a_failed_fetch() -> None:
    async with fetching() as fetcher:
        error = await failure(fetcher.fetch("http://127.0.0.1:1/?secret", "image"))

    assert (error.status, error.slug) == (422, "media_fetch_failed")
    assert "127.0.0.1" not in f"{error!r} {error.__cause__!r}"


# Caching


async def test_an_unchanged_picture_is_asked_about_and_not_sent_again(
    origin: FakeOrigin,
) -> None:
    origin.headers["ETag"] = '"1"'
    async with fetching() as fetcher:
        found = [await fetcher.fetch(origin.url, "image") for _ in range(3)]

    assert found == [PICTURE] * 3
    assert len(origin.requests) == 3
    assert origin.sent == 1


@pytest.mark.parametrize("etag", [True, False])
async def test_a_changed_picture_is_seen_at_once(origin: FakeOrigin, etag: bool) -> None:
    async with fetching() as fetcher:
        for content in (b"one", b"two", b"one"):
            origin.content = content
            if etag:
                origin.headers["ETag"] = f'"{content.decode()}"'
            assert await fetcher.fetch(origin.url, "image") == data_url(content)

    assert origin.sent == 3


async def test_max_age_saves_the_question_until_it_is_over(origin: FakeOrigin) -> None:
    origin.headers |= {"Cache-Control": "max-age=1", "ETag": '"1"'}
    async with fetching() as fetcher:
        started = asyncio.get_running_loop().time()
        await fetcher.fetch(origin.url, "image")
        origin.content = b"another"
        origin.headers["ETag"] = '"2"'
        while (found := await fetcher.fetch(origin.url, "image")) == PICTURE:
            assert len(origin.requests) == 1
            await asyncio.sleep(0.05)

        assert asyncio.get_running_loop().time() - started >= 1
        assert found == data_url(b"another")


async def test_a_304_can_make_it_fresh_again(origin: FakeOrigin) -> None:
    origin.headers["ETag"] = '"1"'
    async with fetching() as fetcher:
        await fetcher.fetch(origin.url, "image")
        origin.headers["Cache-Control"] = "max-age=1000"
        for _ in range(3):
            await fetcher.fetch(origin.url, "image")

    assert len(origin.requests) == 2
    assert origin.sent == 1


@pytest.mark.parametrize("said", ["no-store", "private, max-age=1000"])
async def test_media_that_may_not_be_cached_are_not_cached(origin: FakeOrigin, said: str) -> None:
    origin.headers |= {"Cache-Control": said, "ETag": '"1"'}
    async with fetching() as fetcher:
        await fetcher.fetch(origin.url, "image")
        await fetcher.fetch(origin.url, "image")

    assert origin.sent == 2
    assert "If-None-Match" not in origin.requests[1][1]


async def test_tenants_share_nothing(origin: FakeOrigin) -> None:
    origin.headers["Cache-Control"] = "private, max-age=1000"
    async with fetching() as fetcher:
        for scope in ("a", "b", "a", "b"):
            await fetcher.fetch(origin.url, "image", scope)

    assert origin.sent == 2


async def test_redirected_media_are_revalidated_at_their_own_url(origin: FakeOrigin) -> None:
    targets = ["/1"]

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/0":
            return web.Response(status=302, headers={"Location": targets[-1]})
        headers = {"Content-Type": "image/png", "ETag": '"1"', "Cache-Control": "max-age=1000"}
        if request.headers.get("If-None-Match") == '"1"':
            return web.Response(status=304, headers=headers)
        return web.Response(body=request.path.encode(), headers=headers)

    origin.answer = answer
    async with fetching() as fetcher:
        found = [await fetcher.fetch(f"{origin.url}/0", "image") for _ in range(2)]
        targets.append("/2")
        found.append(await fetcher.fetch(f"{origin.url}/0", "image"))

    assert found == [data_url(b"/1"), data_url(b"/1"), data_url(b"/2")]
    asked = [(path, headers.get("If-None-Match")) for path, headers in origin.requests]
    assert asked == [
        *(("/0", None), ("/1", None)),
        *(("/0", None), ("/1", '"1"')),
        *(("/0", None), ("/2", None)),
    ]


@pytest.mark.parametrize(
    ("said", "asked"),
    [("max-age=1000", 1), ("", 2), ("no-store, max-age=1000", 2), ("private, max-age=1000", 2)],
)
async def test_redirected_media_expire_with_the_redirect(
    origin: FakeOrigin, said: str, asked: int
) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.path == "/0":
            return web.Response(status=302, headers={"Location": "/1", "Cache-Control": said})
        return web.Response(body=b"picture", headers={"Cache-Control": "max-age=1000"})

    origin.answer = answer
    async with fetching() as fetcher:
        for _ in range(2):
            await fetcher.fetch(f"{origin.url}/0", "image")

    assert asked == [path for path, _ in origin.requests].count("/0")


async def test_a_deleted_picture_is_dropped_and_an_origin_error_is_not_a_deletion(
    origin: FakeOrigin,
) -> None:
    def answers(status: int) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(_: web.Request) -> web.Response:
            return web.Response(status=status)

        return answer

    origin.headers["ETag"] = '"1"'
    async with fetching() as fetcher:
        await fetcher.fetch(origin.url, "image")
        origin.answer = answers(503)
        assert (await failure(fetcher.fetch(origin.url, "image"))).status == 422
        origin.answer = None
        await fetcher.fetch(origin.url, "image")
        assert origin.sent == 1
        origin.answer = answers(410)
        assert (await failure(fetcher.fetch(origin.url, "image"))).status == 422
        origin.answer = None
        await fetcher.fetch(origin.url, "image")

    assert origin.sent == 2


# Concurrent fetches


async def test_an_abandoned_download_is_cancelled(origin: FakeOrigin) -> None:
    origin.answer = hangs
    async with fetching() as fetcher:
        tasks = [asyncio.create_task(fetcher.fetch(origin.url, "image")) for _ in range(2)]
        await until(lambda: origin.requests)
        for task in tasks:
            task.cancel()

        await until(lambda: origin.aborted == 1)
