"""Costs of `epd observe`.

    python scripts/bench_observe.py cpu        # CPU of a request with a picture of 1 MB
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
import os
import random
import statistics
import sys
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import orjson
from aiohttp import web
from aiohttp.test_utils import unused_port

from epd.tools.observe.lru_cache import LruCache

PICTURE_BYTES = 1_000_000
CHAT = "/v1/chat/completions"
CLOCK = os.sysconf("SC_CLK_TCK")


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


def measure_memory() -> None:
    """Print the memory of a cache without a limit after 100 thousand and a million items."""
    numbers = random.Random(1)
    tracemalloc.start()
    cache = LruCache()
    for done in range(1, 10**6 + 1):
        cache.refer(numbers.getrandbits(64), 1.0, (1, 0))
        if done in {10**5, 10**6}:
            now, peak = tracemalloc.get_traced_memory()
            print(f"{done:,} items: {now / 1e6:.1f} MB, at most {peak / 1e6:.1f} MB")


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("cpu", "memory", "server", "bare"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--port", type=int)
    parser.add_argument("--server")
    flags = parser.parse_args()
    if flags.what == "cpu":
        asyncio.run(measure_cpu(flags.rounds, flags.requests))
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
