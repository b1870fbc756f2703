"""In which order pictures come back, and what an ideal cache makes of it."""

import random
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType

NEW_IN_ARENA = 43 / 200
"""VisionArena-Chat has some 43,000 pictures in 200,000 conversations."""
LOCAL = "local"
POOL, POOL_REUSE = 200, 0.8
WINDOW, WINDOW_ROUND = 50, 5

Trace = list[int]
"""The number of the picture that each conversation is about; numbers say nothing but same or not.
The traces of a replay begin alike, however long they are."""


def rng(*names: object) -> random.Random:
    """A generator for what is called so: what it draws depends on nothing that others drew."""
    return random.Random("/".join(map(str, names)))  # noqa: S311 - repeatable is what is wanted


def arena(draw: random.Random, length: int) -> Trace:
    """New pictures as often as in VisionArena-Chat; else the picture of any earlier conversation.

    What was asked about often is asked about again more often (Simon's model): the picture of rank
    n has a share of about n ** -(1 - NEW_IN_ARENA), near Zipf's law. The rate is the same in a
    short trace as in all of the data set, from whose 200,000 conversations a small sample would
    hold hardly a picture twice.
    """
    trace: Trace = []
    for number in range(length):
        new = not trace or draw.random() < NEW_IN_ARENA
        trace.append(number if new else draw.choice(trace))
    return trace


def pool(draw: random.Random, length: int) -> Trace:
    """A pool of 200 pictures at 80% reuse: 1 in 5 conversations brings one that nobody else has."""
    return [
        draw.randrange(POOL) if draw.random() < POOL_REUSE else POOL + number
        for number in range(length)
    ]


def window(draw: random.Random, length: int) -> Trace:
    """A sliding window: 4 of 5 pictures were among the last 50."""
    trace: Trace = []
    for number in range(length):
        trace.append(draw.choice(trace[-WINDOW:]) if number % WINDOW_ROUND else number)
    return trace


REPLAYS: Mapping[str, Callable[[random.Random, int], Trace]] = MappingProxyType(
    {LOCAL: arena, "pool": pool, "window": window}
)
"""By the name of the data set that follows it."""


def ideal_hit_rate(trace: Sequence[Hashable], entries: int | None = None) -> float:
    """The hits that a cache has which keeps everything, or the most recently used `entries`.

    Raises:
        ValueError: the trace is empty.
    """
    if not trace:
        raise ValueError("a trace of nothing has no hit rate")
    held: OrderedDict[Hashable, None] = OrderedDict()
    hits = 0
    for picture in trace:
        hits += picture in held
        held[picture] = None
        held.move_to_end(picture)
        if entries is not None and len(held) > entries:
            held.popitem(last=False)
    return hits / len(trace)


def seen_before(trace: Iterable[Hashable]) -> list[bool]:
    """Of each picture, whether it came before."""
    seen: set[Hashable] = set()
    before = []
    for picture in trace:
        before.append(picture in seen)
        seen.add(picture)
    return before
