"""What looking at several workers costs them: `GET /metrics`, and the page of `GET /ui`.

    PYTHONPATH=. .venv/bin/python scripts/bench_looks.py --workers 1 4 8 --seconds 30

Starts `epd serve` before fake instances, asks it until every worker has something to tell, and then
asks nothing. CPU time is that of all threads, as the kernel counts it, a second and a worker.
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

from epd.fleet import Topology, free_ports
from epd.routing.instances import Role
from scripts.chaos import command, proxy_flags
from scripts.chaos_fleet import DiskStore, Instance
from scripts.chaos_load import Clients, Line, Questions, ask
from scripts.chaos_proxy import FIRST_PROCESS, Proxy

SCRAPE_S, LOOK_S = 5.0, 1.0
"""How often Prometheus scrapes, and how often the page looks."""

QUESTIONS = 40
"""For each worker, so that each has metrics of every stage."""

FADES_S = 8.0
"""After the last look, workers go on writing for a while."""

Look = Callable[[aiohttp.ClientSession], Coroutine[Any, Any, None]]


async def nobody(_: aiohttp.ClientSession) -> None:
    """Look at nothing."""
    await asyncio.Event().wait()


def getter(url: str, every_s: float, took_ms: list[float], length: list[int]) -> Look:
    """Something that is looked at again and again."""

    async def look(http: aiohttp.ClientSession) -> None:
        while True:
            began_s = perf_counter()
            async with http.get(url, raise_for_status=True) as reply:
                length.append(len(await reply.read()))
            took_ms.append(1000 * (perf_counter() - began_s))
            await asyncio.sleep(every_s)

    return look


def cpu_ms(pid: int) -> float:
    """CPU time of all threads of a process so far."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e6


async def cost(proxy: Proxy, look: Look, seconds: float) -> tuple[float, float]:
    """CPU milliseconds a second: the mean of the workers, and the first process."""
    async with Line().session() as http:
        looking = asyncio.create_task(look(http))
        await asyncio.sleep(FADES_S)  # into the pace of it, and out of the one before
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
    """A row: so many workers, looked at in each way."""
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
        for one in instances:
            await one.ready()
        await proxy.ready()
        await ask_all(Clients(proxy.url, Questions(Random(1))), QUESTIONS * workers)  # noqa: S311
        return await rows(proxy, seconds)


def started(role: Role, port: int, store: str, folder: Path) -> Instance:
    """A fake instance."""
    flags = {"--role": role, "--port": port, "--store": store, "--token-s": 0.0}
    words = command("scripts.chaos_instance", flags=flags)
    return Instance(role, port, words, folder / f"{role}-{port}.log")


async def ask_all(clients: Clients, count: int) -> None:
    """Ask so many requests, each on a connection of its own."""
    async with Line().session() as http:
        for _ in range(count):
            await ask(http, clients.url, clients.questions.plain())


async def rows(proxy: Proxy, seconds: float) -> Mapping[str, Any]:
    """What each way of looking costs, and how long an answer takes."""
    times: dict[str, list[float]] = {"metrics": [], "state": []}
    sizes: dict[str, list[int]] = {"metrics": [], "state": []}
    ways: dict[str, Look] = {
        "nobody": nobody,
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
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--seconds", type=float, default=30.0, help="of each way of looking")
    args = parser.parse_args()
    for workers in args.workers:
        with tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(measured(workers, args.seconds, Path(folder)))
        print(workers, {name: round(value, 2) for name, value in found.items()}, flush=True)


if __name__ == "__main__":
    main()
