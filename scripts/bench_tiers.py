"""Measure a host's memory with tiers: dead ones, large ones, and what a directory should get.

PYTHONPATH=. .venv/bin/python scripts/bench_tiers.py dead growth rule
"""

import argparse
import heapq
import os
import random
import statistics
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from ec_store.arena.protocol import GetStats, TierStats
from ec_store.arena.store import ArenaStore
from ec_store.disk.store import SharedDiskStore
from ec_store.redis.store import RedisStore
from scripts.memory_server import entry, key, opened, serving
from tests.support.redis_server import RedisServer

DATA = memoryview(bytes(1024))
OPERATIONS = 900
"""Operations of each kind: their entries fit into the memory and into one queue."""

ONE_OFFS = 0.6
BATCH = 100


class Served(NamedTuple):
    """Server of a memory: its process, and a client."""

    pid: int
    store: ArenaStore

    def cpu_s(self) -> float:
        """Return the processor time that the server has taken."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def loop_s(self) -> float:
        """Return the processor time that the thread of the server's event loop has taken."""
        return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[0]) / 1e9

    def tier(self) -> TierStats:
        """Return the numbers of its only tier."""
        [stats] = self.store._ask(GetStats()).tiers.values()  # noqa: SLF001
        return stats


@contextmanager
def served_with(*tiers: str) -> Iterator[Served]:
    """Run a server of a memory with these tiers."""
    with serving("256MiB", *tiers) as (path, pid), opened(path) as store:
        yield Served(pid, store)


def dead(rounds: int) -> None:
    """Compare hits in a memory with dead tiers with those in one without a tier."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        Path(folder, "file").touch()
        tiers = (f"file://{folder}/file/nvme", "redis://127.0.0.1:1")
        alone, behind = (stack.enter_context(served_with(*each)) for each in ((), tiers))
        keys = [key(n) for n in range(64)]
        for served in (alone, behind):
            for each in keys:
                served.store.put(each, entry(DATA))
            for n in range(8):  # both tiers have failed
                served.store.lookup([key(f"missing {n}")])
        calls: dict[str, Callable[[ArenaStore], object]] = {
            "look-up of one": lambda store: store.lookup(keys[:1]),
            "look-up of 64": lambda store: store.lookup(keys),
            "lease": lambda store: store.lease(keys[:1], 5.0),
            "read": lambda store: store.get(keys[1]),
        }
        for name, call in calls.items():
            ratios = []
            for n in range(rounds):
                spent = {}
                # Each is the first one in half of the rounds.
                for served in ((alone, behind), (behind, alone))[n % 2]:
                    began_s = served.loop_s() + time.thread_time()
                    for _ in range(BATCH):
                        call(served.store)
                    spent[served.pid] = served.loop_s() + time.thread_time() - began_s
                ratios.append(spent[behind.pid] / spent[alone.pid])
            few, most = statistics.quantiles(ratios, n=4)[::2]
            print(
                f"{name}: processor time of client and server with dead tiers over that without: "
                f"median {statistics.median(ratios):.3f}, quartiles {few:.3f}, {most:.3f}"
            )


def growth(sizes: Sequence[int]) -> None:
    """Measure the server's processor time of a hit, a miss and a write, by entries of the tier."""
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder) / "redis") as redis:
        for size in sizes:
            path = f"file://{folder}/nvme-{size}"
            with SharedDiskStore.from_url(path) as store:
                for n in range(size):
                    store.put(key(n), entry(DATA))
            with RedisStore.from_url(redis.url()) as store_in_redis:
                redis.client.flushall()
                for n in range(size):
                    store_in_redis.put(key(n), entry(DATA))
            for url in (path, redis.url()):
                with served_with(url) as served:
                    print(f"{url.partition(':')[0]} with {size} entries: {costs(served)}")


def costs(served: Served) -> str:
    """Return what operations of one server cost."""
    store = served.store
    found = [key(n) for n in range(OPERATIONS)]
    lost = [key(f"missing {n}") for n in range(OPERATIONS)]
    texts = []
    began_s = served.cpu_s()
    for each in found:
        store.lookup([each])
    while served.tier().fetched < OPERATIONS:
        time.sleep(0.01)
    texts.append(("hit", served.cpu_s() - began_s))
    began_s = served.cpu_s()
    for each in lost:
        store.lookup([each])
    texts.append(("miss", served.cpu_s() - began_s))
    began_s = served.cpu_s()
    for each in lost:
        store.put(each, entry(DATA))
    store.lease(lost, 0.001)
    while served.tier().sent < OPERATIONS:
        time.sleep(0.01)
    texts.append(("write", served.cpu_s() - began_s))
    empty_s, many_s = [], []
    for n in range(200):
        began_s = time.perf_counter()
        store.check()
        empty_s.append(time.perf_counter() - began_s)
        keys = [key(f"none {n} {place}") for place in range(64)]
        began_s = time.perf_counter()
        store.lookup(keys)
        many_s.append(time.perf_counter() - began_s)
    ratio = statistics.median(many_s) / statistics.median(empty_s)
    shown = ", ".join(f"{name} {1e6 * each_s / OPERATIONS:.0f}" for name, each_s in texts)
    late, drops = served.tier().late, served.tier().drops
    return f"{shown} us; 64 misses over an empty trip {ratio:.1f}; late {late}, dropped {drops}"


def rule(requests: int) -> None:
    """Simulate which entries a directory gets, by requests of which 60 % are one-offs."""
    memory = 1000
    for name in ("zipf 20000 0.8", "zipf 20000 1.0", "chats 20000", "chats 2000"):
        for ratio in (4, 16, 64):
            cells = [
                "{:.3f} ({:.2f})".format(*run(trace(name, requests), memory, memory * ratio, how))
                for how in ("none", "all", "used", "seen")
            ]
            print(f"{name}, {ratio}: {' | '.join(cells)}", flush=True)


def trace(name: str, requests: int) -> Iterator[int]:
    """Yield the items of requests; those of a chat come back 8 times, after random gaps."""
    chosen, one_off = random.Random(1), 10**9  # noqa: S311 - no secret
    kind, size, *power = name.split()
    weights = [1 / (n + 1) ** float(power[0]) for n in range(int(size))] if power else [1.0]
    sums = list(accumulate(weights))
    waiting: list[tuple[float, int, int]] = []
    for now in range(requests):
        one_off += 1
        if chosen.random() < ONE_OFFS:
            yield one_off
        elif kind == "zipf":
            [item] = chosen.choices(range(len(sums)), cum_weights=sums)
            yield item
        else:
            due = waiting and waiting[0][0] <= now
            _, item, left = heapq.heappop(waiting) if due else (0.0, one_off, 8)
            yield item
            if left > 1:
                gap = chosen.expovariate(1 / int(size))
                heapq.heappush(waiting, (now + gap, item, left - 1))


def run(items: Iterator[int], memory: int, directory: int, how: str) -> tuple[float, float]:
    """Return hits and writes per request, with least recent use in memory and directory.

    The directory gets nothing (`none`), `all` entries, those `used` a second time in the memory, or
    also those `seen` twice.
    """
    kept: OrderedDict[int, None] = OrderedDict()
    below: OrderedDict[int, None] = OrderedDict()
    seen: OrderedDict[int, None] = OrderedDict()
    requests = hits = writes = 0
    for item in items:
        requests += 1
        again = item in kept
        hits += again or item in below
        wanted = how == "all" or (how in {"used", "seen"} and again)
        wanted |= how == "seen" and item in seen
        if wanted and item not in below:
            writes += 1
        if wanted or item in below:
            below[item] = None
            below.move_to_end(item)
        for each, most in ((kept, memory), (seen, 65536), (below, directory)):
            if each is not below:
                each[item] = None
                each.move_to_end(item)
            if len(each) > most:
                each.popitem(last=False)
    return hits / requests, writes / requests


def main() -> None:
    """Print one line for each measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("dead", "growth", "rule")
    parser.add_argument("parts", nargs="*", default=parts, help=f"of {', '.join(parts)}")
    args = parser.parse_args()
    if "dead" in args.parts:
        dead(100)
    if "growth" in args.parts:
        growth((1000, 100_000))
    if "rule" in args.parts:
        rule(300_000)


if __name__ == "__main__":
    main()
