"""A proxy of the last release beside one of this, with one store, one set of keys, one registry."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ec_store import open_store
from tests.compat.releases import Proxy, Release
from tests.requests import image, request
from tests.support.backed import NAMESPACE, Backed
from tests.support.fake_instance import REPLY, FakeInstance, decodes, encodes
from tests.support.fleet import until
from tests.support.redis_server import RedisServer

pytestmark = pytest.mark.full

Pair = tuple[Release, Release]
KEY = ("epd.encoder_cache.identity", "content_key(Scope(), 'image', Inline('', b'YWJj'))")
"""Key that a release derives of a picture."""

ADMIN = "0123456789abcdef0123456789abcdef"


@pytest.fixture(params=["last first", "this first"])
def pair(request: pytest.FixtureRequest, releases: Pair) -> Pair:
    """Return both releases in either order."""
    this, last = releases
    return (last, this) if request.param == "last first" else (this, last)


@dataclass
class Instances:
    """Fake instances that use a store of this release, and flags of a proxy in front of them."""

    backed: Backed
    encode: FakeInstance
    decode: FakeInstance
    http: aiohttp.ClientSession

    def flags(self, store: str) -> list[str]:
        return [
            *("--encode-servers-urls", self.encode.url),
            *("--decode-servers-urls", self.decode.url),
            *("--ec-store", store, "--ec-store-budget-s", "5", "--load-interval-s", "0"),
        ]

    async def items(self, proxy: Proxy, content: bytes) -> str:
        """Ask about a picture; return how its item was found."""
        body = request(image(content))
        async with self.http.post(f"{proxy.url}/v1/chat/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            assert await reply.json() == REPLY
            counts = (pair.split("=") for pair in reply.headers["x-epd-items"].split(","))
            [found] = [name for name, count in counts if count == "1"]
            return found


@asynccontextmanager
async def instances(url: str, folder: Path) -> AsyncIterator[Instances]:
    async with AsyncExitStack() as stack:
        store = stack.enter_context(open_store(url))
        store.register_namespace("m", NAMESPACE)
        backed = Backed(store, folder)
        encode = await stack.enter_async_context(FakeInstance(backed.encodes).running())
        decode = await stack.enter_async_context(FakeInstance(backed.decodes).running())
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Instances(backed, encode, decode, http)
        await asyncio.gather(*backed.writes)


async def test_proxies_share_entries_and_claims_if_they_derive_the_same_keys(
    pair: Pair, redis: RedisServer, tmp_path: Path
) -> None:
    first, second = pair
    same = len({one.value(*KEY) for one in pair}) == 1
    async with instances(redis.url(), tmp_path) as fleet:
        flags = fleet.flags(redis.url())
        with first.proxy(*flags) as one, second.proxy(*flags) as other:
            assert await fleet.items(one, b"cat") == "encoded"
            await asyncio.gather(*fleet.backed.writes)
            assert await fleet.items(other, b"cat") == ("hit" if same else "encoded")
            await asyncio.gather(*fleet.backed.writes)
            assert await fleet.items(one, b"cat") == await fleet.items(other, b"cat") == "hit"

            fleet.backed.encode_s = 1.0
            before = len(fleet.encode.calls)
            await asyncio.gather(*(fleet.items(proxy, b"bird") for proxy in (one, other)))
            assert len(fleet.encode.calls) - before == (1 if same else 2)


@pytest.mark.parametrize("kind", ["file", "shm"])
async def test_proxy_answers_also_where_it_refuses_the_store(
    kind: str, pair: Pair, tmp_path: Path
) -> None:
    owner, guest = pair
    constant = ("disk.config", "FORMAT") if kind == "file" else ("arena.protocol", "VERSION")
    versions = {release.value(f"ec_store.{constant[0]}", constant[1]) for release in pair}
    refusal = "format version" if kind == "file" else "run one release of ec_store in both"
    url = f"file://{tmp_path}/store"

    async with AsyncExitStack() as stack:
        if kind == "shm":
            url = stack.enter_context(owner.memory(tmp_path / "arena.sock"))
        store = stack.enter_context(owner.store(url))
        store.call("register_namespace", "m", NAMESPACE)
        encode = await stack.enter_async_context(FakeInstance(encodes).running())
        decode = await stack.enter_async_context(FakeInstance(decodes).running())
        http = await stack.enter_async_context(aiohttp.ClientSession())
        fleet = Instances(Backed(None, tmp_path), encode, decode, http)  # type: ignore[arg-type] # unused
        proxy = stack.enter_context(guest.proxy(*fleet.flags(url)))

        assert await fleet.items(proxy, b"cat") == "encoded"
        if len(versions) == 2:
            await until(lambda: logged(proxy, refusal))
        else:
            assert not logged(proxy, refusal)


def logged(proxy: Proxy, text: str) -> list[Any]:
    """Return the warnings and errors that contain a text."""
    return [
        line
        for line in list(proxy.lines)
        if line["level"] in {"warning", "error"} and text in str(line)
    ]


async def test_registrations_and_keys_of_one_release_hold_in_the_other(
    pair: Pair, redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    monkeypatch.setenv("EPD_ADMIN_API_KEY", ADMIN)
    hashed = first.run("epd", "hash-key", "alice", "--stdin", stdin="a-key-of-alice-0123456789\n")
    keys = tmp_path / "keys"
    keys.write_text(hashed.stdout)
    keys.chmod(0o600)
    flags = [
        *("--dynamic-registration", "--registration-store", redis.url()),
        *("--api-keys-file", str(keys), "--load-interval-s", "0"),
    ]
    async with instances(redis.url(), tmp_path) as fleet:
        with first.proxy(*flags) as one, second.proxy(*flags) as other:
            operator = {"Authorization": f"Bearer {ADMIN}"}
            for role, instance in (("encode", fleet.encode), ("decode", fleet.decode)):
                body = {"url": instance.url, "role": role}
                async with fleet.http.post(
                    f"{one.url}/instances", json=body, headers=operator
                ) as reply:
                    assert reply.status in {200, 201}, await reply.text()
            client = {"Authorization": "Bearer a-key-of-alice-0123456789"}
            async with asyncio.timeout(30):
                while True:
                    async with fleet.http.post(
                        f"{other.url}/v1/chat/completions",
                        json=request(image(b"cat")),
                        headers=client,
                    ) as reply:
                        body = await reply.json()
                        if reply.status == 200:
                            break
                        assert reply.status == 503, body
                    await asyncio.sleep(0.1)
            assert body == REPLY
