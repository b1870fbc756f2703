"""Chaos test: the proxy under load while instances, store and clients fail at random.

    .venv/bin/python scripts/chaos.py --seconds 60 --seed 1

It starts fake instances, a store and `epd serve`, each in a process. It sends requests, injects
faults, and checks every response. It ends with a report. The exit code is 1 if a request was lost,
a response was wrong, an error was not excused by an active fault, or a resource was leaked.

With --workers, several processes serve, and all but the first are killed, each about once in 45 s.
Only the requests that the worker had accepted may fail with it. The invariants are checked in each
process.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from epd.routing.instances import Role
from epd.tools.up.topology import Topology
from scripts.chaos_faults import Faults, kills_of_workers, plan, storm
from scripts.chaos_fleet import DiskStore, Instance, RedisStore
from scripts.chaos_load import MAX_BODY_BYTES, Clients, Line, Questions, ask
from scripts.chaos_proxy import Proxy, answered, not_asked_by, under_way
from scripts.chaos_report import MORE_FDS, Figures, Left, Sample, figures
from scripts.ports import free_ports

PROXY_FLAGS = {
    "--encode-timeout-s": 4,
    "--prefill-timeout-s": 6,
    "--first-byte-timeout-s": 12,
    "--idle-timeout-s": 8,
    "--request-timeout-s": 40,
    "--suspect-s": 2,
    "--ec-store-budget-s": 0.5,
    "--max-body-bytes": MAX_BODY_BYTES,
    "--eject-s": 2,
    "--probe-interval-s": 1,
    "--health-timeout-s": 2,
}
"""Deadlines short enough to end a fault, and long enough for a busy machine; ejections are short.
Without a stream, a hanging decode ends at the request's own deadline."""

SERVES_WITHIN_S = 60.0
SETTLES_WITHIN_S = 30.0
IN_A_ROW = 8


@dataclass
class Stand:
    """Running system under test, with its memory samples.

    Attributes:
        proxy: proxy under test.
        instances: fake instances behind it.
        store: encoder store.
        memory: memory of the proxy's processes, one sample per second.
    """

    proxy: Proxy
    instances: Sequence[Instance]
    store: DiskStore | RedisStore
    memory: list[Sample] = field(default_factory=list)

    async def watch(self, until: asyncio.Event) -> None:
        clock = asyncio.get_running_loop().time
        while not until.is_set():
            self.proxy.check_alive()
            self.memory.append((clock(), self.proxy.rss_mb()))
            await asyncio.sleep(1.0)

    async def sum(self, what: str) -> int:
        """Return the sum of one number that each instance reports."""
        return sum([(await instance.state())[what] for instance in self.instances])

    async def left(self, fds: Mapping[str, int]) -> Left:
        """Return the resources in use now.

        Args:
            fds: descriptors of each process of the proxy at the start.
        """
        pages, now = await self.proxy.pages(), self.proxy.fds()
        kept = await self.sum("kept")
        return Left(
            recovered=True,
            idle=(),
            open=await self.sum("open"),
            under_way=[*under_way(pages), *not_asked_by(pages)],
            claims=self.store.claims(),
            kept=kept,
            kept_later=kept,
            fds={name: (first, now.get(name, 0)) for name, first in fds.items()},
        )


@asynccontextmanager
async def standing(args: argparse.Namespace, folder: Path) -> AsyncIterator[Stand]:
    """Start store, instances and proxy, and wait until they serve."""
    roles: Sequence[Role] = args.topology.roles
    port, *ports = free_ports(1 + len(roles))
    async with AsyncExitStack() as stack:
        store = (DiskStore if args.store == "file" else RedisStore)(folder / "store")
        stack.callback(store.close)
        instances = []
        for role, at in zip(roles, ports, strict=True):
            flags = {"--role": role, "--port": at, "--store": store.url, "--token-s": args.token_s}
            words = command("scripts.chaos_instance", flags=flags)
            instances.append(Instance(role, at, words, folder / f"{role}-{at}.log"))
            stack.callback(instances[-1].kill)
        given = proxy_flags(instances, store.url, port, args.workers) | PROXY_FLAGS
        words = command("epd", "serve", flags=given)
        proxy = Proxy(words, port, folder / "proxy.log", args.workers)
        stack.callback(proxy.stop)
        for instance in instances:
            await instance.ready()
        await proxy.ready()
        yield Stand(proxy, instances, store)


def command(*words: str, flags: dict[str, Any]) -> list[str]:
    """Return the command line of a module of this tree."""
    pairs = [str(word) for pair in flags.items() for word in pair]
    return [sys.executable, "-m", *words, *pairs]


def proxy_flags(
    instances: Sequence[Instance], store: str, port: int, workers: int
) -> dict[str, Any]:
    """Return the flags of a proxy in front of these instances."""

    def urls(*roles: Role) -> str:
        return ",".join(instance.url for instance in instances if instance.role in roles)

    return {
        "--host": "127.0.0.1",
        "--port": port,
        "--workers": workers,
        "--encode-servers-urls": urls(Role.ENCODE),
        "--prefill-servers-urls": urls(Role.PREFILL),
        "--decode-servers-urls": urls(Role.DECODE, Role.PREFILL_DECODE),
        "--ec-store": store,
        "--log-format": "json",
    }


async def run(args: argparse.Namespace, folder: Path) -> Figures:
    """Send requests and inject faults for a while, then check for leaks."""
    async with standing(args, folder) as stand:
        clients = Clients(stand.proxy.url, Questions(random.Random(args.seed)))  # noqa: S311
        if not await serves(clients):
            raise TimeoutError(f"the proxy does not serve before the first fault: see {folder}")
        fds, faults = stand.proxy.fds(), Faults()
        await weather(args, stand, clients, faults)
        left = await remains(stand, clients, fds)
        left = replace(left, processes=stand.proxy.stop(), surprises=stand.proxy.surprises())
        return figures(clients.outcomes, faults.seen, stand.proxy.cuts, stand.memory, left)


async def weather(args: argparse.Namespace, stand: Stand, clients: Clients, faults: Faults) -> None:
    until = asyncio.Event()
    asyncio.get_running_loop().call_later(args.seconds, until.set)
    async with asyncio.TaskGroup() as group:
        group.create_task(stand.watch(until))
        rng = random.Random(args.seed)  # noqa: S311 - a schedule, no secret
        planned = plan((*stand.instances, stand.store), rng, args.seconds)
        planned += kills_of_workers(stand.proxy.killable, rng, args.seconds)
        group.create_task(storm(faults, planned))
        group.create_task(clients.run(args.concurrency, until))


async def remains(stand: Stand, clients: Clients, fds: Mapping[str, int]) -> Left:
    """Return the leaks, after the proxy had time to recover."""
    recovered = await serves(clients)
    idle = await not_asked(stand, clients)
    settled = await settles(stand, fds)
    recovered = await serves(clients) and recovered
    later = await settles(stand, fds)
    return replace(later, recovered=recovered, idle=idle, kept=settled.kept)


async def settles(stand: Stand, fds: Mapping[str, int]) -> Left:
    """Wait until no resource is in use, at most `SETTLES_WITHIN_S`; return what is left."""
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + SETTLES_WITHIN_S
    while True:
        left = await stand.left(fds)
        calm = all(last <= first + MORE_FDS for first, last in left.fds.values())
        if (calm and not (left.open or left.under_way or left.claims)) or clock() > deadline_s:
            return left
        await asyncio.sleep(0.5)


async def serves(clients: Clients) -> bool:
    """Return whether `IN_A_ROW` requests in a row succeed within `SERVES_WITHIN_S`."""
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + SERVES_WITHIN_S
    right = 0
    async with Line().session() as http:
        while right < IN_A_ROW and clock() < deadline_s:
            outcome = await ask(http, clients.url, clients.questions.plain())
            right = right + 1 if outcome.result == "right" else 0
    return right == IN_A_ROW


async def not_asked(stand: Stand, clients: Clients) -> list[str]:
    """Return the instances and workers that get no request within `SERVES_WITHIN_S`."""
    before = {instance: (await instance.state())["asked"] for instance in stand.instances}
    idle = list(stand.instances)
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + SERVES_WITHIN_S
    async with aiohttp.ClientSession() as http:
        while idle and clock() < deadline_s:
            await ask(http, clients.url, clients.questions.plain())
            idle = [
                instance
                for instance in idle
                if (await instance.state())["asked"] == before[instance]
            ]
    return [*(instance.name for instance in idle), *await idle_workers(stand, clients, deadline_s)]


async def idle_workers(stand: Stand, clients: Clients, deadline_s: float) -> list[str]:
    """Return the proxy's processes that answer none of many requests before the deadline."""
    before = {name: answered(page) for name, page in (await stand.proxy.pages()).items()}
    clock = asyncio.get_running_loop().time
    while True:
        async with asyncio.TaskGroup() as group:
            for _ in range(IN_A_ROW):
                group.create_task(asked_alone(clients))
        pages = await stand.proxy.pages()
        idle = [name for name, page in pages.items() if answered(page) <= before.get(name, 0)]
        if not idle or clock() > deadline_s:
            return idle


async def asked_alone(clients: Clients) -> None:
    """Send a request on a new connection, which any worker may accept."""
    async with Line().session() as http:
        await ask(http, clients.url, clients.questions.plain())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--concurrency", "--requests-in-flight", type=int, default=24, help="concurrent clients"
    )
    parser.add_argument("--topology", type=Topology.parse, default="2e2p2d", help="or 2e2pd")
    parser.add_argument("--store", choices=("file", "redis"), default="file")
    parser.add_argument(
        "--workers", type=int, default=1, help="serving processes; all but the first are killed"
    )
    parser.add_argument(
        "--token-s", type=float, default=0.03, help="seconds per word of a response"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="folder for logs, which are kept"
    )
    return parser.parse_args()


@contextmanager
def folder_of(args: argparse.Namespace) -> Iterator[Path]:
    """Return the folder for logs and the store; delete it at the end unless `--keep` is given."""
    if args.keep is None:
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)
    else:
        args.keep.mkdir(parents=True)
        yield args.keep


def main() -> None:
    """Run the chaos test, and print its report."""
    args = arguments()
    with folder_of(args) as folder:
        seen = asyncio.run(run(args, folder))
    print(seen.to_json().decode())
    sys.exit(1 if seen.broken else 0)


if __name__ == "__main__":
    main()
