"""Cost of monitoring several workers with `GET /metrics` and with the page of `GET /ui`.

    PYTHONPATH=. .venv/bin/python scripts/bench_looks.py --workers 1 4 8 --seconds 30

It starts `epd serve` in front of fake instances and sends requests until every worker has metrics;
then it sends none. CPU time is that of all threads, as the kernel counts it, per second and worker.
"""

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import aiohttp

from epd.routing.instances import Role
from epd.tools.fleet.process import free_ports
from epd.tools.fleet.settings import Topology
from scripts.chaos import command, proxy_flags
from scripts.chaos_fleet import DiskStore, Instance
from scripts.chaos_load import Clients, Line, Questions, ask
from scripts.chaos_proxy import FIRST_PROCESS, Proxy

SCRAPE_S, LOOK_S = 5.0, 1.0
"""Intervals of Prometheus and of the page, in seconds."""

QUESTIONS = 40
"""Number of requests per worker, so that each worker has metrics of every stage."""

FADES_S = 8.0
"""Time for which workers write pages after the last look, in seconds."""

Look = Callable[[aiohttp.ClientSession], Coroutine[Any, Any, None]]


async def nobody(_: aiohttp.ClientSession) -> None:
    """Wait without sending a request: the cost without monitoring."""
    await asyncio.Event().wait()


def getter(url: str, every_s: float, took_ms: list[float], length: list[int]) -> Look:
    """Return a function that reads a URL at an interval and records times and sizes."""

    async def look(http: aiohttp.ClientSession) -> None:
        while True:
            began_s = perf_counter()
            async with http.get(url, raise_for_status=True) as reply:
                length.append(len(await reply.read()))
            took_ms.append(1000 * (perf_counter() - began_s))
            await asyncio.sleep(every_s)

    return look


def cpu_ms(pid: int) -> float:
    """Return the CPU time of all threads of a process so far, in milliseconds."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e6


async def cost(proxy: Proxy, look: Look, seconds: float) -> tuple[float, float]:
    """Return CPU milliseconds per second: the mean of the workers, and the first process."""
    async with Line().session() as http:
        looking = asyncio.create_task(look(http))
        await asyncio.sleep(FADES_S)  # until the previous way has no more effect
        before = {name: cpu_ms(pid) for name, pid in proxy.processes.items()}
        await asyncio.sleep(seconds)
        spent = {
            name: (cpu_ms(pid) - before[name]) / seconds for name, pid in proxy.processes.items()
        }
        looking.cancel()
        await asyncio.wait([looking])
        if not looking.cancelled():
            looking.result()
    first = spent.pop(FIRST_PROCESS, 0.0)
    return statistics.mean(spent.values()), first


async def measured(workers: int, seconds: float, folder: Path) -> Mapping[str, Any]:
    """Return a row of the table: the cost of each way for this number of workers."""
    roles = Topology.parse("2e2p2d").roles
    port, *ports = free_ports(1 + len(roles))
    async with AsyncExitStack() as stack:
        store = DiskStore(folder / "store")
        stack.callback(store.close)
        instances = []
        for role, at in zip(roles, ports, strict=True):
            instances.append(started(role, at, store.url, folder))
            stack.callback(instances[-1].kill)
        flags = proxy_flags(instances, store.url, port, workers)
        proxy = Proxy(command("epd", "serve", flags=flags), port, folder / "proxy.log", workers)
        stack.callback(proxy.stop)
        for instance in instances:
            await instance.ready()
        await proxy.ready()
        await ask_all(Clients(proxy.url, Questions(Random(1))), QUESTIONS * workers)  # noqa: S311
        return await rows(proxy, seconds)


def started(role: Role, port: int, store: str, folder: Path) -> Instance:
    """Start a fake instance of this role."""
    flags = {"--role": role, "--port": port, "--store": store, "--token-s": 0.0}
    words = command("scripts.chaos_instance", flags=flags)
    return Instance(role, port, words, folder / f"{role}-{port}.log")


async def ask_all(clients: Clients, count: int) -> None:
    """Send this number of requests, each on a new connection."""
    async with Line().session() as http:
        for _ in range(count):
            await ask(http, clients.url, clients.questions.plain())


async def rows(proxy: Proxy, seconds: float) -> Mapping[str, Any]:
    """Return the cost of each way of monitoring, and the times and sizes of its responses."""
    times: dict[str, list[float]] = {"metrics": [], "state": []}
    sizes: dict[str, list[int]] = {"metrics": [], "state": []}
    ways: dict[str, Look] = {
        "unmonitored": nobody,
        "metrics": getter(f"{proxy.url}/metrics", SCRAPE_S, times["metrics"], sizes["metrics"]),
        "ui": getter(f"{proxy.url}/ui/state", LOOK_S, times["state"], sizes["state"]),
    }
    found: dict[str, Any] = {}
    for name, look in ways.items():
        found[name], found[f"first process, {name}"] = await cost(proxy, look, seconds)
    for name, took in times.items():
        found[f"{name} ms"] = statistics.median(took)
        found[f"{name} KB"] = sizes[name][-1] / 1000
    return found


def main() -> None:
    """Print a row for each number of workers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds per way of monitoring")
    args = parser.parse_args()
    for workers in args.workers:
        with tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(measured(workers, args.seconds, Path(folder)))
        print(workers, {name: round(value, 2) for name, value in found.items()}, flush=True)


if __name__ == "__main__":
    main()
