"""Servers that write to two namespaces, as during an update of a model's encoder."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ec_store import EntryKey, Store
from epd.request.choices import RecentItems
from tests.requests import image, png, request, text
from tests.support.backed import BUDGET_S, Both, items_of, parts_of
from tests.support.fake_instance import refuses
from tests.support.fleet import Fleet, Launch, until

NAMESPACES = ("m@0:old", "m@0:new")
PICTURE = image(png(100, 101))


class Server(Both):
    """Server that names its namespace. Once `go` is set, it refuses its first request."""

    def __init__(self, store: Store, path: Path, namespace: str, go: asyncio.Event) -> None:
        super().__init__(store, path, namespace)
        self._namespace, self.go, self.refuses = namespace, go, True
        self.scrapes = self.asked = 0
        self.uuids: list[str] = []

    async def metrics(self) -> web.Response:
        self.scrapes += 1
        labels = f'engine="0",model_name="m",namespace="{self._namespace}"'
        producer = 'vllm:ec_store_producer{engine="0",model_name="m"} 1.0'
        return web.Response(
            text=f"# HELP\nvllm:ec_store_namespace_info{{{labels}}} 1.0\n{producer}\n"
        )

    async def chat(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.asked += 1
        self.uuids += [part["uuid"] for part in parts_of(body) if "image_url" in part]
        if self.asked == 1:
            await self.go.wait()
            if self.refuses:
                return await refuses(503)(http, body)
        return await self.decodes(http, body)


@asynccontextmanager
async def updating(
    launch: Launch, store: Store, url: str, folder: Path
) -> AsyncIterator[tuple[Fleet, list[Server], asyncio.Event]]:
    """Run the proxy before a server of each namespace; return the event that they wait for."""
    store.register_namespace("m", NAMESPACES[1])
    go = asyncio.Event()
    both = [Server(store, folder, name, go) for name in NAMESPACES]
    async with launch(
        servers=2, load_interval_s=0.05, ec_store=url, ec_store_budget_s=BUDGET_S
    ) as fleet:
        for instance, server in zip(fleet.decode, both, strict=True):
            instance.metrics, instance.chat = server.metrics, server.chat
        await until(lambda: all(server.scrapes > 1 for server in both))
        yield fleet, both, go


async def test_requests_that_encode_again_do_not_wait_for_each_other(
    launch: Launch, store: Store, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each still has the claim that the other one needs."""
    # Both would go to the server that has had the picture.
    monkeypatch.setattr(RecentItems, "nearest_url", lambda *_: None)
    async with updating(launch, store, url, tmp_path / "store") as (fleet, both, go):
        asked = []
        for _ in both:
            asked.append(asyncio.create_task(items_of(fleet, request(text(), PICTURE))))
            await until(lambda: sum(server.asked for server in both) == len(asked))
        go.set()
        async with asyncio.timeout(4):  # less than the wait for another request's consumer
            assert await asyncio.gather(*asked) == [{"local": 1}] * 2
    assert [server.asked for server in both] == [2, 2]


@pytest.mark.fault(165)
async def test_a_claim_is_released_when_the_request_goes_to_a_consumer_of_another_namespace(
    launch: Launch, store: Store, url: str, tmp_path: Path
) -> None:
    """The new consumer, which may take long, writes no entry for those that wait for the claim."""
    hangs = asyncio.Event()
    async with updating(launch, store, url, tmp_path / "store") as (fleet, both, go):
        asked = asyncio.create_task(items_of(fleet, request(text(), PICTURE)))
        await until(lambda: any(server.asked for server in both))
        first = next(number for number, server in enumerate(both) if server.asked)
        key, second = EntryKey(NAMESPACES[first], both[first].uuids[0]), both[1 - first]
        assert store.claim([key], "another proxy", 10.0) == [False]

        second.go, second.refuses = hangs, False
        go.set()
        await until(lambda: second.asked > 0)
        async with asyncio.timeout(10):
            await until(lambda: store.claim([key], "another proxy", 10.0)[0])
        hangs.set()
        assert await asked == {"local": 1}
