"""Costs and accuracy of `epd observe`.

    python scripts/bench_observe.py cpu        # CPU of a request with a picture of 1 MB
    python scripts/bench_observe.py accuracy   # predicted hit rates beside real caches
    python scripts/bench_observe.py memory     # bytes of the counts after a million items

`cpu` compares the relay with a bare relay of aiohttp that decodes the picture and computes one
digest of it. Both are processes of their own and get requests in turns.
"""

# ruff: noqa: S311 - random numbers of a benchmark are no secrets

import argparse
import asyncio
import base64
import hashlib
import json
import math
import os
import random
import statistics
import sys
import tracemalloc
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import count
from pathlib import Path

import aiohttp
import orjson
from aiohttp import web
from aiohttp.test_utils import unused_port

from epd.tools.observe.reuse import ReuseDistances

PICTURE_BYTES = 1_000_000
CHAT = "/v1/chat/completions"
CLOCK = os.sysconf("SC_CLK_TCK")

Trace = list[tuple[int, float]]


async def answer(request: web.Request) -> web.Response:
    """Answer as a server that needs no time."""
    await request.read()
    return web.json_response({"choices": []})


def bare_relay(server: str) -> web.Application:
    """Return a relay of aiohttp that decodes and digests each picture."""

    async def relay(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        url = orjson.loads(body)["messages"][0]["content"][0]["image_url"]["url"]
        hashlib.blake2b(base64.b64decode(url.partition(",")[2])).digest()
        session = request.app[SESSION]
        headers = {"Content-Type": request.content_type}
        async with session.post(server + request.path, data=body, headers=headers) as reply:
            response = web.StreamResponse(status=reply.status, headers=reply.headers)
            await response.prepare(request)
            async for chunk in reply.content.iter_any():
                await response.write(chunk)
            return response

    async def sessions(app: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession() as session:
            app[SESSION] = session
            yield

    app = web.Application(client_max_size=0)
    app.router.add_post(CHAT, relay)
    app.cleanup_ctx.append(sessions)
    return app


SESSION = web.AppKey("session", aiohttp.ClientSession)


def cpu_s(pid: int) -> float:
    """Return the seconds of CPU that a process has used, in all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK


async def measure_cpu(rounds: int, requests: int) -> None:
    """Print the CPU of a request through each relay, and their ratio."""
    ports = {name: unused_port() for name in ("server", "bare", "observe")}
    server = f"http://127.0.0.1:{ports['server']}"
    commands = {
        "server": (__file__, "server", "--port"),
        "bare": (__file__, "bare", "--server", server, "--port"),
        "observe": ("-m", "epd", "observe", "--servers-urls", server, "--port"),
    }
    processes = {
        name: await asyncio.create_subprocess_exec(
            *(sys.executable, *command, str(ports[name])), stdout=asyncio.subprocess.DEVNULL
        )
        for name, command in commands.items()
    }
    used: dict[str, list[float]] = {"bare": [], "observe": []}
    try:
        async with aiohttp.ClientSession() as http:
            for port in ports.values():
                await wait_for(http, f"http://127.0.0.1:{port}/health")
            for number in range(rounds + 1):
                for name, times in used.items():
                    before_s = cpu_s(processes[name].pid)
                    for _ in range(requests):
                        url = f"http://127.0.0.1:{ports[name]}{CHAT}"
                        async with http.post(url, data=body(number), headers=JSON_TYPE) as reply:
                            await reply.read()
                    await asyncio.sleep(0.2)  # what counts in a thread
                    if number:  # the first round starts connections
                        times.append((cpu_s(processes[name].pid) - before_s) / requests)
    finally:
        for process in processes.values():
            process.terminate()
        await asyncio.gather(*(process.wait() for process in processes.values()))
    for name, times in used.items():
        print(f"{name}: {statistics.median(times) * 1000:.2f} ms of CPU for a request")
    ratios = [ours / bare for ours, bare in zip(used["observe"], used["bare"], strict=True)]
    least, most = min(ratios), max(ratios)
    print(f"observe over bare: {statistics.median(ratios):.2f} ({least:.2f} to {most:.2f})")


JSON_TYPE = {"Content-Type": "application/json"}


def body(number: int) -> bytes:
    """Return a request with a picture of 1 MB, another one for each number."""
    content = random.Random(number).randbytes(PICTURE_BYTES)
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": [part]}]}).encode()


async def wait_for(http: aiohttp.ClientSession, url: str) -> None:
    """Wait until something answers at a URL."""
    while True:
        try:
            async with http.get(url) as reply:
                await reply.read()
                return
        except aiohttp.ClientConnectionError:
            await asyncio.sleep(0.05)


def traces(references: int, seed: int) -> Iterator[tuple[str, Trace]]:
    """Yield traces of items with sizes: a pool, windows of conversations, many one-offs.

    Each has a fixed number of references for each of its items.
    """
    numbers, unique = random.Random(seed), count(10**9)

    def one_size(item: int) -> float:
        return 1 + item * 7919 % 100 / 50

    pool = (numbers.randrange(references // 10) for _ in range(references))
    yield "pool", [(item, one_size(item)) for item in pool]
    windows = [[next(unique) for _ in range(5)] for _ in range(references // 67)]
    window: Trace = []
    while len(window) < references:
        items = numbers.choice(windows)
        fresh = 5 if numbers.random() < 1 / 8 else 1
        items[:] = items[fresh:] + [next(unique) for _ in range(fresh)]
        window += ((item, one_size(item)) for item in items)
    yield "window", window
    one_offs: Trace = []
    for _ in range(references):
        one_off = numbers.random() < 0.6  # noqa: PLR2004
        item = next(unique) if one_off else int(references / 5 * numbers.random() ** 3)
        one_offs.append((item, one_size(item)))
    yield "60 % one-offs", one_offs


def lru_hits(trace: Trace, capacity: float) -> int:
    """Return the hits of a least recently used cache of this capacity."""
    cache, used, hits = OrderedDict[int, float](), 0.0, 0
    for item, size in trace:
        if item in cache:
            hits += 1
            cache.move_to_end(item)
        else:
            cache[item] = size
            used += size
        while used > capacity:
            used -= cache.popitem(last=False)[1]
    return hits


def measure_accuracy(references: int, shares: Sequence[float]) -> None:
    """Print the errors of predicted hit rates by the share of sampled items.

    More than `ReuseDistances.most` items are sampled by a share that falls.
    The error is the largest one over the caches with a real hit rate of 15 to 85 %, and over three
    seeds.
    """
    errors = defaultdict[tuple[str, float], list[float]](list)
    sampled = dict[tuple[str, float], float]()
    for seed in range(3):
        salt = random.Random(seed).getrandbits(64)
        for name, trace in traces(references, seed):
            items = dict(trace)
            stores = [sum(items.values()) * part for part in (0.1, 0.2, 0.3, 0.5, 0.7)]
            real = {size: lru_hits(trace, size) / references for size in stores}
            for share in shares:
                distances = ReuseDistances(stores, share=share)
                for item, size in trace:
                    distances.refer(random.Random(item ^ salt).getrandbits(64), size)
                sampled[name, share] = distances.share * len(items)
                errors[name, share] += [
                    abs(distances.hits(size) / references - rate)
                    for size, rate in real.items()
                    if 0.15 <= rate <= 0.85  # noqa: PLR2004
                ]
    for (name, share), found in errors.items():
        items_sampled = round(sampled[name, share])
        print(f"{name}, share {share:.0%}: {items_sampled} items sampled, error {max(found):.4f}")


def measure_memory() -> None:
    """Print the memory of the counts after 100 thousand, a million and ten million items."""
    numbers = random.Random(1)
    tracemalloc.start()
    distances = ReuseDistances((1e9, math.inf))
    for done in range(1, 10**7 + 1):
        distances.refer(numbers.getrandbits(64), 1.0, (1, 0))
        if done in {10**5, 10**6, 10**7}:
            now, peak = tracemalloc.get_traced_memory()
            print(f"{done:,} items: {now / 1e6:.1f} MB, at most {peak / 1e6:.1f} MB")


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("cpu", "accuracy", "memory", "server", "bare"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--references", type=int, default=20_000)
    parser.add_argument("--shares", type=float, nargs="+", default=(1.0, 0.1, 0.01))
    parser.add_argument("--port", type=int)
    parser.add_argument("--server")
    flags = parser.parse_args()
    if flags.what == "cpu":
        asyncio.run(measure_cpu(flags.rounds, flags.requests))
    elif flags.what == "accuracy":
        measure_accuracy(flags.references, flags.shares)
    elif flags.what == "memory":
        measure_memory()
    elif flags.what == "server":
        app = web.Application(client_max_size=0)
        app.router.add_route("*", "/{path:.*}", answer)
        web.run_app(app, port=flags.port, access_log=None, print=None)
    else:
        web.run_app(bare_relay(flags.server), port=flags.port, access_log=None, print=None)


if __name__ == "__main__":
    main()
