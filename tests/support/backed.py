"""Fake instances that do what the connector does with a real store, and a proxy that uses it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ec_store import Entry, EntryKey, Store, StoreUnavailable
from ec_store.opening import open_proxy_store
from epd.aio import Background
from epd.config.sections.transfers import TransferSettings
from epd.encoder_cache.claims import Claims
from epd.encoder_cache.client import EncoderCache
from epd.server import app as proxy_app
from tests.requests import Part
from tests.support import fake_instance
from tests.support.fake_instance import (
    ENCODE_TEXT,
    REPLY,
    FakeInstance,
    Handler,
    decodes,
    encodes,
    prefills,
    refuses,
)
from tests.support.fleet import Fleet, Launch

NAMESPACE = "m@main:0123"
THUMB = {"image_grid_thw": [1, 8, 8]}
"""Placeholder metadata of a small picture."""
BUDGET_S = 5.0
"""Time budget of lookups; large, so that results do not depend on the speed of the machine."""


def cache_settings(lease_s: float, budget_s: float = BUDGET_S) -> TransferSettings:
    """Return the settings of a cache without a proxy."""
    return TransferSettings(ec_store_lease_s=lease_s, ec_store_budget_s=budget_s)


def opened_cache(url: str, config: TransferSettings, **options: Any) -> EncoderCache:
    """Return the proxy's client of a store, without a proxy: a context manager."""
    opened = partial(open_proxy_store, url)
    return EncoderCache(opened, config, Background(lambda *_: None, first_delay_s=0.01), **options)


def refresh_stores(monkeypatch: pytest.MonkeyPatch, refresh_s: float, **limits: Any) -> None:
    """Let proxies read the namespaces, and open a store that is away, at this interval."""
    made = partial(EncoderCache, refresh_s=refresh_s, **limits)
    monkeypatch.setattr(proxy_app, "EncoderCache", made)


def limit_claims(monkeypatch: pytest.MonkeyPatch, **limits: float) -> list[Claims]:
    """Let proxies claim with these limits; return the claims that they make."""
    made: list[Claims] = []

    def make(cache: EncoderCache) -> Claims:
        made.append(Claims(cache, **limits))
        return made[-1]

    monkeypatch.setattr(proxy_app, "Claims", make)
    return made


def registered(store: Store) -> bool:
    """Register the namespace, as engines do at their start; return whether that succeeds."""
    try:
        store.register_namespace("m", NAMESPACE)
    except StoreUnavailable:
        return False
    return True


class Backed:
    """Fake instances that do what the connector does with a real store."""

    def __init__(self, store: Store, folder: Path, namespace: str = NAMESPACE) -> None:
        self.store = store
        self.namespace = namespace
        self.folder = folder
        self.encode_s = 0.0
        self.write_s = 0.0
        self.writes: list[asyncio.Task[None]] = []

    async def encodes(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        """Answer, and write the entry a little later."""
        await asyncio.sleep(self.encode_s)
        reply = await encodes(request, body)
        said = json.loads(reply.text or "")
        for identifier, item in said["ec_transfer_params"].items():
            item["namespace"] = self.namespace
            modality = next(iter(item["metadata"])).partition("_")[0]
            write = self._write(identifier, modality, item["metadata"])
            self.writes.append(asyncio.create_task(write))
        return web.json_response(said)

    async def _write(self, identifier: str, modality: str, metadata: dict[str, Any]) -> None:
        await asyncio.sleep(self.write_s)
        entry = Entry(memoryview(bytes(16)), "F32", (1, 4), modality, metadata)
        await asyncio.to_thread(self.store.put, EntryKey(self.namespace, identifier), entry)

    async def prefills(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await self._consumes(prefills, request, body)

    async def decodes(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await self._consumes(decodes, request, body)

    async def _consumes(
        self, answers: Handler, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        """Answer; fail as vLLM does if an item without media is not in the store."""
        promised = body.get("ec_transfer_params") or {}
        for part in parts_of(body):
            if any(key.endswith("_embeds") for key in part):
                uuid = part["uuid"]
                if not await self._has(uuid, waits=100 if uuid in promised else 1):
                    return await refuses(500, "Internal server error")(request, body)
        return await answers(request, body)

    async def _has(self, identifier: str, waits: int) -> bool:
        for _ in range(waits):
            if await asyncio.to_thread(self.store.get, EntryKey(self.namespace, identifier)):
                return True
            await asyncio.sleep(0.02)
        return False

    async def corrupt(self) -> None:
        """Change a byte of every entry."""
        await asyncio.gather(*self.writes)
        for path in (self.folder / "entries").rglob("*"):
            if path.is_file():
                content = bytearray(path.read_bytes())
                content[-1] ^= 1
                path.chmod(0o600)
                path.write_bytes(content)

    async def forget(self) -> None:
        """Delete every entry."""
        await asyncio.gather(*self.writes)
        keys = [row.info.key for row in self.store.ls() if row.info is not None]
        await asyncio.to_thread(self.store.delete, keys)


class Both(Backed):
    """Instances of which the consumers write what they encode, as with the `ec_role` ec_both."""

    async def decodes(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        for part in parts_of(body):
            if "image_url" in part and not await self._has(part["uuid"], waits=1):
                await self._write(part["uuid"], "image", THUMB)
        return await super().decodes(request, body)

    async def serves(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Answer encode requests too, as a server of `--servers-urls` does."""
        contents = [message["content"] for message in body["messages"]]
        encodes = any(ENCODE_TEXT in content for content in contents)
        return await (self.encodes if encodes else self.decodes)(request, body)


class Page:
    """Metrics page of a consumer.

    Attributes:
        writes: whether it says that its engine writes to the store.
        asked: number of times that it was read.
    """

    def __init__(self, *, writes: bool = True) -> None:
        self.writes = writes
        self.asked = 0

    async def __call__(self) -> web.Response:
        self.asked += 1
        labels = 'engine="0",model_name="m"'
        return web.Response(
            text="# HELP\n"
            f'vllm:ec_store_namespace_info{{{labels},namespace="{NAMESPACE}"}} 1.0\n'
            f"vllm:ec_store_producer{{{labels}}} {float(self.writes)}\n"
        )


def parts_of(body: dict[str, Any]) -> list[Part]:
    return fake_instance.parts_of(body.get("messages") or body["input"])


@asynccontextmanager
async def caching(launch: Launch, backed: Backed, url: str, **config: Any) -> AsyncIterator[Fleet]:
    """Run a fleet with instances and a proxy that use the store."""
    defaults: dict[str, Any] = {"ec_store": url, "ec_store_budget_s": BUDGET_S}
    async with launch(**defaults | config) as fleet:
        for instance in fleet.encode:
            instance.chat = backed.encodes
        # A decode instance behind prefill has no connector.
        for instance in fleet.prefill:
            instance.chat = backed.prefills
        for instance in fleet.decode if not fleet.prefill else ():
            instance.chat = backed.decodes
        yield fleet
        await asyncio.gather(*backed.writes)


async def items_of(fleet: Fleet, body: dict[str, Any]) -> dict[str, int]:
    """Return the header `x-epd-items` of the answer to this request."""
    async with fleet.post(body) as reply:
        assert reply.status == 200, await reply.text()
        assert await reply.json() == REPLY
        pairs = (pair.split("=") for pair in reply.headers["x-epd-items"].split(","))
        return {name: int(count) for name, count in pairs if count != "0"}


def encoded(fleet: Fleet) -> int:
    return sum(len(instance.calls) for instance in fleet.encode)


def media_types(instance: FakeInstance) -> list[list[str]]:
    return [[part["type"] for part in call.parts] for call in instance.calls]
