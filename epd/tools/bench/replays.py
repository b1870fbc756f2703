"""Orders in which requests repeat pictures; they determine the hits of an ideal cache. No I/O."""

import random
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType

NEW_IN_ARENA = 43 / 200
"""Share of new pictures: VisionArena-Chat has some 43,000 in 200,000 conversations."""
POOL, POOL_REUSE = 200, 0.8
WINDOW, WINDOW_ROUND = 50, 5

Trace = list[int]
"""Number of the picture of each conversation; equal numbers mean equal pictures. A longer trace of
a replay begins with the shorter one."""


def arena_trace(draw: random.Random, length: int) -> Trace:
    """Return a trace with as many new pictures as VisionArena-Chat; the others are repeated ones.

    A frequent picture is repeated more often (Simon's model): the picture of rank n has a share of
    about n ** -(1 - NEW_IN_ARENA), near Zipf's law. A short trace has the same rate as the whole
    data set. A small sample of the 200,000 conversations would repeat hardly any picture.
    """
    trace: Trace = []
    for number in range(length):
        new = not trace or draw.random() < NEW_IN_ARENA
        trace.append(number if new else draw.choice(trace))
    return trace


def pool(draw: random.Random, length: int) -> Trace:
    """Return a trace of 200 pictures at 80% reuse: 1 of 5 conversations has a unique picture."""
    return [
        draw.randrange(POOL) if draw.random() < POOL_REUSE else POOL + number
        for number in range(length)
    ]


def window_trace(draw: random.Random, length: int) -> Trace:
    """Return a trace with a sliding window: 4 of 5 pictures were among the last 50."""
    trace: Trace = []
    for number in range(length):
        trace.append(draw.choice(trace[-WINDOW:]) if number % WINDOW_ROUND else number)
    return trace


REPLAYS: Mapping[str, Callable[[random.Random, int], Trace]] = MappingProxyType(
    {"local": arena_trace, "pool": pool, "window": window_trace}
)
"""Function that makes the trace, by the name of the data set."""


def ideal_hit_rate(trace: Sequence[Hashable]) -> float:
    """Return the hit rate of a cache of all pictures, which is empty at first."""
    return (len(trace) - len(set(trace))) / len(trace)


def seen_before(trace: Iterable[Hashable]) -> list[bool]:
    """Return for each picture of the trace whether it occurred before."""
    seen: set[Hashable] = set()
    before = []
    for picture in trace:
        before.append(picture in seen)
        seen.add(picture)
    return before
