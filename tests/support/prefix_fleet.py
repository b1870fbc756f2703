"""A fleet of engines with prefix caches of limited size, in simulated time, behind the real choice.

Each engine computes one prompt after the other, at a fixed rate, and then decodes it for a fixed
time beside others. Its cache evicts the least recently used links. The proxies get its load and
the size of its cache as reports, once a second.
"""

import heapq
import itertools
import random
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from epd.api.items import Path
from epd.kv_events.blocks import BlockMap
from epd.kv_events.markers import marker_of, sampled_prefix
from epd.request.prefix import Chain
from epd.routing import BalanceName
from epd.routing.balance import Choice
from epd.routing.instances import Instance, Role
from epd.routing.prefix import Prefix, PrefixCache
from epd.routing.reports import Report
from epd.routing.table import InFlight, InstanceTable

CACHE_TOKENS = 200_000
TOKENS_PER_S = 25_000.0
DECODE_S = 1.0
REPORTS_S = 1.0

GROUPS, PER_GROUP, RATE = 600, 5, 40.0
SYSTEM_TOKENS, PICTURES, PICTURE_TOKENS, OWN_TOKENS = 2_000, 3, 1_300, 100


class Asked(NamedTuple):
    """A request: when it arrives, its prompt and its session."""

    at_s: float
    prefix: Prefix
    session: str


def prompt(system: str, pictures: Sequence[str], own: str) -> Prefix:
    """Return a chat request with a system prompt, pictures and a question, of the tokens above."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": "x"}}] * len(pictures)
    question = {"type": "text", "text": own.ljust(4 * OWN_TOKENS)}
    messages = [
        {"role": "system", "content": system.ljust(4 * SYSTEM_TOKENS)},
        {"role": "user", "content": [*parts, question]},
    ]
    media: dict[Path, tuple[str, int]] = {
        ("messages", 1, "content", index): (key, PICTURE_TOKENS)
        for index, key in enumerate(pictures)
    }
    chain = Chain({"model": "m", "messages": messages}, media)
    return Prefix(chain.links, chain.ends)


def groups(gap_s: float) -> list[Asked]:
    """Return requests of groups that share a system prompt and pictures.

    Args:
        gap_s: mean time between two requests of a group, in seconds.
    """
    chance, asked = random.Random(1), list[Asked]()  # noqa: S311 - the same at every run
    whole_s = GROUPS * PER_GROUP / RATE
    for group in range(GROUPS):
        at_s = chance.uniform(0, whole_s)
        for number in range(PER_GROUP):
            pictures = [f"{group}-{picture}" for picture in range(PICTURES)]
            own = prompt(f"system {group}", pictures, f"question {group} {number}")
            asked.append(Asked(at_s % whole_s, own, f"session {group}"))
            at_s += chance.expovariate(1 / gap_s)
    return sorted(asked)


def popular(share: float, count: int) -> list[Asked]:
    """Return requests of which this share has one picture; all others have their own."""
    chance = random.Random(1)  # noqa: S311 - the same at every run
    return [
        Asked(
            number / RATE,
            prompt("system", ["hot" if chance.random() < share else f"{number}"], f"own {number}"),
            "",
        )
        for number in range(count)
    ]


class Engine:
    """An engine: its cache, its queue, and what it has computed."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.waiting: deque[Sent] = deque()
        self.running = 0
        self.computed = 0
        self._cache: OrderedDict[int, int] = OrderedDict()

    def match(self, prefix: Prefix) -> int:
        """Return the number of links at the beginning of a prompt that it has."""
        return sum(1 for _ in itertools.takewhile(self._cache.__contains__, prefix.links))

    def compute(self, prefix: Prefix) -> int:
        """Return the tokens that it has to compute for a prompt, and cache the prompt."""
        computed = prefix.tokens - prefix.tokens_of(self.match(prefix))
        self.computed += computed
        starts = (0, *prefix.ends)
        for link, start, end in reversed(
            list(zip(prefix.links, starts, prefix.ends, strict=False))
        ):
            self._cache[link] = end - start
            self._cache.move_to_end(link)
        held = sum(self._cache.values())
        while held > CACHE_TOKENS:
            held -= self._cache.popitem(last=False)[1]
        return computed

    def restart(self) -> None:
        self._cache.clear()


BLOCK_TOKENS = 100


class Follower:
    """A proxy's view of one engine, by its events."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._blocks = BlockMap()
        self.listens = True

    def store(self, blocks: Sequence[int], parent: int | None, mark: str) -> None:
        if self.listens:
            self._blocks.record_stored(blocks, parent, BLOCK_TOKENS, mark)
            self._cache.apply_changes(self._blocks.take_changes())

    def remove(self, blocks: Sequence[int]) -> None:
        if self.listens:
            self._blocks.record_removed(blocks)
            self._cache.apply_changes(self._blocks.take_changes())

    def lose_events(self) -> None:
        """Miss some events: what was reported is an estimate from now on."""
        self._blocks.clear_blocks()
        self._cache.estimate_reported()

    def notice_restart(self) -> None:
        self._blocks.clear_blocks()
        self._cache.clear()


class BlockEngine(Engine):
    """An engine that caches blocks, and reports which it stores and removes.

    Its tokens are those that the proxy estimates, times a factor. Its speed and its cache have the
    same factor, so that only the proxy's estimates are wrong.
    """

    def __init__(self, instance: Instance, scale: float) -> None:
        super().__init__(instance)
        self.followers: list[Follower] = []
        self.true_caches: list[TrueCache] = []
        self._scale = scale
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match(self, prefix: Prefix) -> int:
        """Return the number of links that end in cached blocks."""
        cached = self._cached(self._blocks_of(prefix))
        return bisect_right(self._ends(prefix), (cached + 1) * BLOCK_TOKENS - 1)

    def compute(self, prefix: Prefix) -> int:
        blocks = self._blocks_of(prefix)
        cached = self._cached(blocks)
        computed = self._ends(prefix)[-1] - cached * BLOCK_TOKENS
        self.computed += computed
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        over = len(self._blocks) - int(CACHE_TOKENS * self._scale) // BLOCK_TOKENS
        removed = [self._blocks.popitem(last=False)[0] for _ in range(over)]
        for cache, link in itertools.product(self.true_caches, prefix.links):
            cache.drop(link)  # it waits no longer
        mark, parent = marker_of(sampled_prefix(prefix)), blocks[cached - 1] if cached else None
        for one in self.followers:
            one.remove(removed)
            if cached < len(blocks):
                one.store(blocks[cached:], parent, mark)
        return round(computed / self._scale)

    def restart(self) -> None:
        self._blocks.clear()

    def _ends(self, prefix: Prefix) -> list[int]:
        return [round(end * self._scale) for end in prefix.ends]

    def _blocks_of(self, prefix: Prefix) -> list[int]:
        """Return a hash for each full block, which depends on the prompt up to its end."""
        ends = self._ends(prefix)
        places = range(BLOCK_TOKENS, ends[-1] + 1, BLOCK_TOKENS)
        return [hash((prefix.links[bisect_left(ends, place)], place)) for place in places]

    def _cached(self, blocks: Sequence[int]) -> int:
        return sum(1 for _ in itertools.takewhile(self._blocks.__contains__, blocks))


class TrueCache(PrefixCache):
    """The engine's own cache, in the place of what a proxy knows of it.

    Beside an engine that caches blocks, the proxy also knows which of its prompts wait there.
    """

    __slots__ = ("_engine",)

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._engine = engine
        if isinstance(engine, BlockEngine):
            engine.true_caches.append(self)

    def match(self, prefix: Prefix) -> int:
        return max(self._engine.match(prefix), super().match(prefix))

    def hold(self, prefix: Prefix) -> None:
        if isinstance(self._engine, BlockEngine):
            super().hold(prefix)


@dataclass(slots=True)
class Sent:
    """A request at an engine."""

    asked: Asked
    using: InFlight


@dataclass
class Fleet:
    """Engines behind proxies that share nothing.

    Attributes:
        balance: balance of the proxies.
        size: number of engines.
        proxies: number of proxies, which get requests in turn.
        true_caches: whether the proxies see the engines' own caches.
        blocks: tokens of the engines, which cache blocks, for each token that proxies estimate;
            None for engines that cache links.
        events: whether the proxies get events of these blocks.
        reports_size: whether engines report the size of their caches.
        now_s: simulated time.
        first_s: time from arrival to the end of prefill, of each request.
        loads: after each choice the load of the chosen instance, then those of all, in requests.
    """

    balance: BalanceName
    size: int = 4
    proxies: int = 1
    true_caches: bool = False
    blocks: float | None = None
    events: bool = False
    reports_size: bool = True
    now_s: float = 0.0
    first_s: list[float] = field(default_factory=list)
    loads: list[tuple[int, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        instances = [Instance(Role.PREFILL_DECODE, f"http://pd{n}:1") for n in range(self.size)]
        scale = self.blocks
        self.engines = {
            one: Engine(one) if scale is None else BlockEngine(one, scale) for one in instances
        }
        self.tables = [InstanceTable(instances, clock=self._clock) for _ in range(self.proxies)]
        self._choices = [Choice(table, Role.PREFILL_DECODE) for table in self.tables]
        self._turns = itertools.cycle(zip(self.tables, self._choices, strict=True))
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.followers: list[Follower] = []
        for table, one in itertools.product(self.tables, instances):
            engine = self.engines[one]
            if self.true_caches:
                table.load(one).cache = TrueCache(engine, self._clock)
            if self.events and isinstance(engine, BlockEngine):
                engine.followers.append(follower := Follower(table.load(one).cache))
                self.followers.append(follower)

    @property
    def computed(self) -> int:
        """Prompt tokens that all engines have computed."""
        return sum(engine.computed for engine in self.engines.values())

    @property
    def p90_s(self) -> float:
        return sorted(self.first_s)[len(self.first_s) * 9 // 10]

    def run(self, requests: Sequence[Asked]) -> "Fleet":
        """Run until all requests have ended."""
        for asked in requests:
            self.run_at(asked.at_s, partial(self._arrive, asked))
        for at_s in _every(REPORTS_S, requests[-1].at_s):
            self.run_at(at_s, self._report)
        while self._events:
            self.now_s, _, call = heapq.heappop(self._events)
            call()
        assert len(self.first_s) == len(requests)
        return self

    def _clock(self) -> float:
        return self.now_s

    def run_at(self, at_s: float, call: Callable[[], None]) -> None:
        """Call this at a simulated time."""
        heapq.heappush(self._events, (at_s, next(self._numbers), call))

    def _report(self) -> None:
        size = CACHE_TOKENS if self.reports_size else 0
        for table in self.tables:
            for one in table.reports_due(REPORTS_S):
                engine = self.engines[one]
                report = Report(len(engine.waiting), engine.running, {}, size)
                table.record_report(one, report, REPORTS_S)

    def _arrive(self, asked: Asked) -> None:
        table, choice = next(self._turns)
        prefix = asked.prefix if self.balance == "content" else Prefix()
        chosen = choice.best_instance(balance=self.balance, session=asked.session, prefix=prefix)
        using = table.track_request(chosen, prefix=prefix).begin_request()
        loads = [one.load.value for one in table.all(Role.PREFILL_DECODE)]
        self.loads.append((table.load(chosen).value, loads))
        engine = self.engines[chosen]
        engine.waiting.append(Sent(asked, using))
        if len(engine.waiting) == 1:
            self._compute(engine)

    def _compute(self, engine: Engine) -> None:
        seconds = engine.compute(engine.waiting[0].asked.prefix) / TOKENS_PER_S
        self.run_at(self.now_s + seconds, lambda: self._computed(engine))

    def _computed(self, engine: Engine) -> None:
        sent = engine.waiting.popleft()
        self.first_s.append(self.now_s - sent.asked.at_s)
        sent.using.record_answer()
        engine.running += 1
        self.run_at(self.now_s + DECODE_S, lambda: self._end(engine, sent))
        if engine.waiting:
            self._compute(engine)

    def _end(self, engine: Engine, sent: Sent) -> None:
        engine.running -= 1
        sent.using.end_request()


def _every(interval_s: float, until_s: float) -> Iterator[float]:
    at_s = 0.0
    while at_s < until_s:
        yield at_s
        at_s += interval_s
