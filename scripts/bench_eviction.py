"""Encode seconds that hits save by the order of eviction, over least use, with the real index.

PYTHONPATH=. .venv/bin/python scripts/bench_eviction.py

Each request reads an entry from the index of a host's memory, or writes it, after which its
consumer reads it. The memory has room for a number of mean entries. An encode takes 2 ms, and 12 µs
for each token, twice that at 8,192 tokens: a vision tower with full attention.
"""

# ruff: noqa: S311 - random numbers of a benchmark are no secrets

import argparse
import random
import statistics
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import NamedTuple, Protocol

from ec_store.arena.extents import ExtentAllocator
from ec_store.arena.index import ArenaIndex, Client, Slot
from epd.tools.bench.replays import arena_trace, pool, window_trace

TOKEN_BYTES = 3584 * 2
"""Bytes of a token of Qwen2.5-VL-7B in bfloat16."""

ONE_OFFS = 0.6


class Item(NamedTuple):
    """Item that requests refer to."""

    digest: bytes
    size_bytes: int
    encode_s: float


class Cache(Protocol):
    """Cache of a policy."""

    def refer(self, item: Item) -> bool:
        """Return whether a request for an item is a hit; write it otherwise."""


def traces(draw: random.Random, requests: int) -> Iterator[tuple[str, Sequence[Hashable], bool]]:
    """Yield the workloads: their names, the item of each request, and whether sizes are mixed."""
    yield "pool", pool(draw, requests), False
    yield "window", window_trace(draw, requests), False
    yield "VisionArena", arena_trace(draw, requests), False
    reused = requests // 5
    yield (
        "60 % one-offs",
        [
            -number if draw.random() < ONE_OFFS else int(reused * draw.random() ** 3)
            for number in range(1, requests + 1)
        ],
        True,
    )


def items_of(
    trace: Sequence[Hashable], draw: random.Random, *, mixed: bool, proportional: bool
) -> list[Item]:
    """Return the item of each request: pictures of about a megapixel, or of mixed sizes."""
    made: dict[Hashable, Item] = {}
    for name in trace:
        if name not in made:
            tokens = int(2 ** (draw.uniform(6, 14) if mixed else draw.gauss(10.3, 0.5)))
            seconds = 12e-6 * tokens
            if not proportional:
                seconds = 0.002 + seconds * (1 + tokens / 8192)
            digest = sha256(f"{name}/{draw.random()}".encode()).digest()
            made[name] = Item(digest, tokens * TOKEN_BYTES, seconds)
    return [made[name] for name in trace]


@dataclass(frozen=True)
class Fixed:
    """Replacement of the trial of both orders: always the same one."""

    by_worth: bool

    def refer(self, *_: object) -> None:
        """Do nothing: both orders are not tried."""


class Arena:
    """Index of a host's memory."""

    def __init__(self, size_bytes: int, order: Fixed | None = None) -> None:
        size_bytes = -(-size_bytes // 4096) * 4096
        self.index = ArenaIndex(ExtentAllocator(size_bytes, 2**40))
        if order is not None:
            self.index.trial = order  # type: ignore[assignment]
        self._client = Client()

    def refer(self, item: Item) -> bool:
        """Return whether a request for an item is a hit; write it otherwise."""
        if self._read(item):
            return True
        number = self.index.begin(self._client, Slot(item.digest, b"", item.size_bytes), 0)
        if isinstance(number, int):
            self.index.commit(self._client, number, b"", 0, item.encode_s)
            self._read(item)
        return False

    def _read(self, item: Item) -> bool:
        [pin] = self.index.pin(self._client, [item.digest], 0)
        if pin is not None:
            self.index.unpin(self._client, [pin[0]], 0)
        return pin is not None


class GreedyDual:
    """GreedyDual-Size-Frequency (Cherkasova 1998), by a search for the least priority."""

    def __init__(self, size_bytes: int) -> None:
        self._free_bytes = size_bytes
        self._age = 0.0
        self._kept: dict[Item, tuple[float, int]] = {}

    def refer(self, item: Item) -> bool:
        """Return whether a request for an item is a hit; write it otherwise."""
        uses = self._kept.get(item, (0.0, 0))[1] + 1
        self._kept[item] = self._age + uses * item.encode_s / item.size_bytes, uses
        if uses == 1:
            self._free_bytes -= item.size_bytes
        while self._free_bytes < 0:
            going = min(self._kept, key=self._kept.__getitem__)
            self._age = self._kept.pop(going)[0]
            self._free_bytes += going.size_bytes
        return uses > 1


class TinyLFU:
    """Least use with the admission rule of TinyLFU (Einziger et al. 2017), with exact counts.

    An entry that falls out of the newest tenth stays if it was used more than those that it
    displaces. Counts are halved after ten uses for each entry kept.
    """

    def __init__(self, size_bytes: int) -> None:
        self._new, self._main = OrderedDict[Item, None](), OrderedDict[Item, None]()
        self._new_bytes, self._main_bytes = size_bytes // 10, size_bytes - size_bytes // 10
        self._counts = Counter[Item]()
        self._counted = 0

    def refer(self, item: Item) -> bool:
        """Return whether a request for an item is a hit; write it otherwise."""
        self._counts[item] += 1
        self._counted += 1
        if self._counted > 10 * (len(self._main) + len(self._new)) > 0:
            self._counted //= 2
            self._counts = Counter({each: n // 2 for each, n in self._counts.items() if n > 1})
        for part in (self._new, self._main):
            if item in part:
                part.move_to_end(item)
                return True
        self._new[item] = None
        self._new_bytes -= item.size_bytes
        while self._new_bytes < 0:
            candidate, _ = self._new.popitem(last=False)
            self._new_bytes += candidate.size_bytes
            self._admit(candidate)
        return False

    def _admit(self, candidate: Item) -> None:
        victims, free_bytes = list[Item](), self._main_bytes
        for victim in self._main:
            if free_bytes >= candidate.size_bytes:
                break
            victims.append(victim)
            free_bytes += victim.size_bytes
        worth = sum(self._counts[victim] * victim.encode_s for victim in victims)
        if free_bytes < candidate.size_bytes or (
            victims and self._counts[candidate] * candidate.encode_s <= worth
        ):
            return
        for victim in victims:
            del self._main[victim]
        self._main[candidate] = None
        self._main_bytes = free_bytes - candidate.size_bytes


POLICIES: dict[str, Callable[[int], Cache]] = {
    "least use": partial(Arena, order=Fixed(by_worth=False)),
    "chosen by the trial": Arena,
    "worth": partial(Arena, order=Fixed(by_worth=True)),
    "GDSF": GreedyDual,
    "TinyLFU": TinyLFU,
}


def saved_s(cache: Cache, items: Sequence[Item]) -> float:
    """Return the encode seconds that the hits of a trace save."""
    return sum(item.encode_s for item in items if cache.refer(item))


def main() -> None:
    """Print the seconds saved over those of least use: mean and least of the seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--entries", type=int, nargs="+", default=[50, 100, 200, 400, 800])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument(
        "--proportional", action="store_true", help="encode seconds in proportion to bytes"
    )
    flags = parser.parse_args()
    names = [name for name in flags.policies if name != "least use"]
    print("| workload | mean entries | least use saves |", " | ".join(names), "|")
    print("| --- " * (len(names) + 3) + "|")
    shares: dict[tuple[str, int], list[float]] = defaultdict(list)
    ratios: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for seed in range(flags.seeds):
        draw = random.Random(seed)
        for workload, trace, mixed in traces(draw, flags.requests):
            items = items_of(trace, draw, mixed=mixed, proportional=flags.proportional)
            total_s = sum(item.encode_s for item in items)
            mean_bytes = statistics.mean(item.size_bytes for item in set(items))
            for entries in flags.entries:
                size_bytes = int(entries * mean_bytes)
                base_s = saved_s(POLICIES["least use"](size_bytes), items)
                shares[workload, entries].append(base_s / total_s)
                for name in names:
                    ratio = saved_s(POLICIES[name](size_bytes), items) / base_s
                    ratios[workload, entries, name].append(ratio)
    for (workload, entries), share in shares.items():
        cells = [ratios[workload, entries, name] for name in names]
        texts = [f"{statistics.mean(cell):.2f}, {min(cell):.2f}" for cell in cells]
        print(f"| {workload} | {entries} | {statistics.mean(share):.0%} |", " | ".join(texts), "|")


if __name__ == "__main__":
    main()
