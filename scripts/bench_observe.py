"""Errors of the hit rates that `epd observe` predicts, beside caches that run the same trace.

PYTHONPATH=. .venv/bin/python scripts/bench_observe.py --references 20000
"""

# ruff: noqa: S311 - random numbers of a benchmark are no secrets

import argparse
import random
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from itertools import count

from epd.tools.observe.reuse import ReuseDistances

Trace = list[tuple[int, float]]


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


def main() -> None:
    """Print the errors of traces of the length that the command line gives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--references", type=int, default=20_000)
    parser.add_argument("--shares", type=float, nargs="+", default=(1.0, 0.1, 0.01))
    flags = parser.parse_args()
    measure_accuracy(flags.references, flags.shares)


if __name__ == "__main__":
    main()
