"""Encodes of a replay with reused pictures, for a store that cannot hold all of them.

    .venv/bin/python scripts/replay_reuse.py
    .venv/bin/python scripts/replay_reuse.py redis://127.0.0.1:6379

It starts the real proxy in front of small servers that imitate encode and decode instances with the
connector, on a real store, at a rate that real engines on a CPU cannot sustain. `epd bench serve`
measures real engines. The replays are its `pool` and `window_trace`. The ideal cache has the same
size and evicts the least recently used picture.
"""

import argparse
import asyncio
import base64
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import orjson
from aiohttp import web

import epd
from ec_store import Entry, EntryKey
from ec_store.aio import AsyncStore
from ec_store.opening import open_async_store
from epd.tools.bench.dataset import ideal_hit_rate, pool, rng, window_trace

NAMESPACE = "replay@main:0"
ENTRY_BYTES = 256 * 1024
GRID = {"image_grid_thw": [1, 36, 54]}


class Instances:
    """Server of both roles: encode writes entries, and decode needs them."""

    def __init__(self, store: AsyncStore) -> None:
        self._store = store
        self.encodes = 0
        self.lost = 0

    async def encode(self, request: web.Request) -> web.Response:
        """Write an entry, and answer with its `ec_transfer_params`."""
        self.encodes += 1
        body = orjson.loads(await request.read())
        uuid = body["messages"][0]["content"][0]["uuid"]
        data = memoryview(np.random.default_rng().bytes(ENTRY_BYTES))
        entry = Entry(data, "BF16", (64, ENTRY_BYTES // 128), "image", GRID)
        await self._store.put(EntryKey(NAMESPACE, uuid), entry)
        reply_params = {uuid: {"item_indices": [0], "metadata": GRID, "namespace": NAMESPACE}}
        return web.json_response({"choices": [], "ec_transfer_params": reply_params})

    async def decode(self, request: web.Request) -> web.Response:
        """Load every item without media from the store; answer 500 if one is missing, as vLLM."""
        body = orjson.loads(await request.read())
        for part in body["messages"][0]["content"]:
            key = EntryKey(NAMESPACE, part["uuid"])
            if part["type"] == "image_embeds" and await self._store.get(key) is None:
                self.lost += 1
                return web.json_response({"error": {"message": "gone"}}, status=500)
        return web.json_response({"choices": []})


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    """Serve an application on a free port, and yield its URL."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def replay(url: str, names: list[str], clients: int, rate: float) -> Instances:
    """Send a request per picture with several clients, at `rate` requests per second."""
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(await open_async_store(url))
        await store.register_namespace("m", NAMESPACE)
        await store.purge(NAMESPACE)
        await store.register_namespace("m", NAMESPACE)
        instances = Instances(store)
        urls = []
        for handler in (instances.encode, instances.decode):
            app = web.Application(client_max_size=2**28)
            app.router.add_post("/v1/chat/completions", handler)
            urls.append(await stack.enter_async_context(served(app)))
        config = epd.ProxyConfig(
            encode_servers_urls=(urls[0],),
            decode_servers_urls=(urls[1],),
            ec_store=url,
            ec_store_budget_s=1.0,
            # At hundreds of requests per second, the leases of one second would fill a small store.
            ec_store_lease_s=0.02,
        )
        proxy = await stack.enter_async_context(served(epd.create_app(config, observers=())))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        clock = asyncio.get_running_loop().time
        began = clock()
        waiting = enumerate(names)

        async def client() -> None:
            for number, name in waiting:
                # An entry is marked as used once per second: the replay must take longer, or the
                # entries have no order of use.
                await asyncio.sleep(began + number / rate - clock())
                async with http.post(f"{proxy}/v1/chat/completions", json=body_of(name)) as reply:
                    reply.raise_for_status()

        await asyncio.gather(*(client() for _ in range(clients)))
        return instances


def body_of(name: str) -> dict[str, Any]:
    """Return a request with a picture; the picture's bytes are the name."""
    content = base64.b64encode(name.encode()).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}
    return {"model": "m", "messages": [{"role": "user", "content": [part]}]}


def main() -> None:
    """Print a table with a row per replay and size of the store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="?", help="store URL; it is emptied (default: a new folder)")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rate", type=float, default=50, help="requests per second")
    args = parser.parse_args()
    print("| replay | store | requests | pictures | encodes | ideal | hit rate / ideal | lost |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for trace in (pool, window_trace):
        names = [str(number) for number in trace(rng(1), args.requests)]
        for entries in (10**6, 400, 150):
            with tempfile.TemporaryDirectory() as folder:
                size = entries * (ENTRY_BYTES + 512)
                url = args.url or f"file://{folder}?max_bytes={size}"
                done = asyncio.run(replay(url, names, args.clients, args.rate))
            hits = ideal_hit_rate(names, entries) * len(names)
            ratio, ideal = (len(names) - done.encodes) / hits, round(len(names) - hits)
            held = "all" if entries == 10**6 else f"{entries} entries"
            cells = (len(names), len(set(names)), done.encodes, ideal, f"{ratio:.4f}", done.lost)
            print(f"| {trace.__name__} | {held} | {' | '.join(map(str, cells))} |", flush=True)
            if args.url:
                break


if __name__ == "__main__":
    main()
