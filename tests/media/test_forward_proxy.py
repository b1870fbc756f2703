"""Fetching of remote media through a forward proxy of the environment."""

import base64
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from epd.check import unusable_files
from epd.config import ProxyConfig
from tests.certificates import Authority
from tests.media.test_fetch import PICTURE, failure, fetching
from tests.support.fake_origin import ALLOWED, FakeNames, FakeOrigin
from tests.support.forward_proxy import FakeForwardProxy

HOST = "media.test"
THROUGH = {"media_fetch_trust_env": True, "allow_private_media": False}
"""Settings without direct access to this machine."""

SECRET = f"Basic {base64.b64encode(b'me:secret:').decode()}".lower()


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
async def proxy(
    origin: FakeOrigin, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[FakeForwardProxy]:
    names = {HOST: ("127.0.0.1", origin.port), "127.0.0.1": ("127.0.0.1", origin.port)}
    async with FakeForwardProxy(names).running() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url.replace("//", "//me:secret%3A@"))
        yield proxy


@pytest.fixture
def names() -> FakeNames:
    """Return a resolver that knows no address of the internet."""
    return FakeNames("10.0.0.1")


async def test_media_are_fetched_through_the_forward_proxy(
    proxy: FakeForwardProxy, origin: FakeOrigin, names: FakeNames
) -> None:
    async with fetching(names, **THROUGH) as fetcher:
        assert await fetcher.fetch(f"http://{HOST}/cat.png?a=b", "image") == PICTURE

    assert proxy.requests == [f"GET http://{HOST}/cat.png?a=b HTTP/1.1"]
    assert names.asked == []  # the forward proxy resolves the name
    assert proxy.authorizations == [SECRET]
    assert origin.sent == 1


async def test_the_environment_is_ignored_without_the_flag(
    proxy: FakeForwardProxy, names: FakeNames
) -> None:
    async with fetching(names, allow_private_media=False) as fetcher:
        error = await failure(fetcher.fetch(f"http://{HOST}/", "image"))

    assert error.slug == "media_not_allowed"
    assert proxy.requests == []


async def test_https_media_are_fetched_through_a_tunnel(
    names: FakeNames, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority.made(tmp_path)
    served = authority.issue(HOST)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(served.chain, served.key)
    trusting = ssl.create_default_context(cafile=authority.ca)
    monkeypatch.setattr("aiohttp.connector._SSL_CONTEXT_VERIFIED", trusting)
    async with FakeOrigin().running(context) as origin:
        tunnels = {f"{HOST}:443": ("127.0.0.1", origin.port)}
        async with FakeForwardProxy(tunnels).running() as proxy:
            monkeypatch.setenv("HTTPS_PROXY", proxy.url.replace("//", "//me:secret%3A@"))
            async with fetching(names, **THROUGH) as fetcher:
                assert await fetcher.fetch(f"https://{HOST}/cat.png", "image") == PICTURE

    assert proxy.requests == [f"CONNECT {HOST}:443 HTTP/1.1"]
    assert proxy.authorizations == [SECRET]
    [(path, headers)] = origin.requests
    assert path == "/cat.png"
    assert set(headers) == {"Host", "Accept", "Accept-Encoding", "User-Agent"}


@pytest.mark.parametrize("variable", [HOST, ".test", f"a.b, {HOST}:80", "*"])
async def test_addresses_of_hosts_in_no_proxy_are_checked(
    proxy: FakeForwardProxy, names: FakeNames, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv("NO_PROXY", variable)
    async with fetching(names, **THROUGH) as fetcher:
        for host in (HOST, f"{HOST}."):
            error = await failure(fetcher.fetch(f"http://{host}/", "image"))
            assert error.slug == "media_not_allowed"
            assert "no address that the media policy allows" in str(error)

    assert proxy.requests == []
    assert names.asked == [HOST, f"{HOST}."]


async def test_a_host_outside_the_list_is_refused_before_the_forward_proxy(
    proxy: FakeForwardProxy, names: FakeNames, origin: FakeOrigin
) -> None:
    async with fetching(names, **THROUGH) as fetcher:
        error = await failure(fetcher.fetch("http://evil.test/", "image"))
        assert "--allowed-media-domains" in str(error)
        error = await failure(fetcher.fetch("http://127.0.0.1/", "image"))
        assert error.slug == "media_not_allowed"  # in the list, and a private address

    assert proxy.requests == []


@pytest.mark.parametrize("status", [407, 502])
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_an_error_of_the_forward_proxy_is_a_failed_fetch(
    proxy: FakeForwardProxy,
    names: FakeNames,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    scheme: str,
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy.url)
    proxy.refuses = status
    async with fetching(names, **THROUGH) as fetcher:
        error = await failure(fetcher.fetch(f"{scheme}://{HOST}/", "image"))

    assert (error.status, error.slug) == (422, "media_fetch_failed")
    assert str(status) in str(error)
    assert ("forward proxy" in str(error)) is (scheme == "https" or status == 407)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:1"])
async def test_an_unreachable_forward_proxy_is_a_failed_fetch(
    names: FakeNames, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", url)
    async with fetching(names, **THROUGH) as fetcher:
        error = await failure(fetcher.fetch(f"http://{HOST}/", "image"))

    assert (error.status, error.slug) == (422, "media_fetch_failed")
    assert "the forward proxy is unreachable" in str(error)


@pytest.mark.parametrize("url", ["socks5://me:secret@proxy:1080", "http://", "http://[", "://x"])
def test_an_invalid_proxy_url_is_a_problem_at_the_start(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    urls = {"encode_servers_urls": "http://e", "decode_servers_urls": "http://d"}
    config = ProxyConfig.model_validate(urls | ALLOWED | THROUGH)
    assert [*unusable_files(config)] == []

    monkeypatch.setenv("https_proxy", url)
    [problem] = unusable_files(config)
    assert "HTTPS_PROXY must be a URL" in problem
    assert "secret" not in problem
    assert [*unusable_files(config.model_copy(update={"media_fetch_trust_env": False}))] == []
