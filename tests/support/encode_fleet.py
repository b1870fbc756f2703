"""Encode and PD instances in simulated time, behind the real placement of items.

An encode instance encodes one item after the other. An encode at a PD instance blocks its engine:
all of its decodes wait for it.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import epd
from ec_store import EntryKey
from epd.api.items import MMItem
from epd.policies.policy import Course, ItemRule
from epd.request.attempt import Attempt
from epd.request.encode_job import EncodeJob, MissingItem
from epd.request.item_tokens import PIXELS_PER_TOKEN, predict_tokens
from epd.request.placement import Placement
from epd.request.request import Request
from epd.routing.balance import Choice
from epd.routing.instances import Instance, Role
from epd.routing.store_access import StoreAccess
from epd.routing.table import InFlight, InstanceTable, Work
from tests.requests import image

REQUEST_S, TOKEN_S = 0.03, 0.0001
"""Speed of every encode instance. The time of a request is on top of an encode at a PD instance."""

CONFIG = epd.ProxyConfig(encode_servers_urls=("http://e:1",), decode_servers_urls=("http://pd:1",))


class Asked(NamedTuple):
    """A request: when it arrives, the tokens of its picture (0 for none), and its decode."""

    at_s: float
    tokens: int
    decode_s: float


def traffic(rate: float, count: int, tokens: Sequence[int], decode_s: float) -> list[Asked]:
    """Return requests at random times, each with a picture of one of these sizes."""
    chance, at_s, asked = random.Random(1), 0.0, list[Asked]()  # noqa: S311 - no secret
    for _ in range(count):
        at_s += chance.expovariate(rate)
        asked.append(Asked(at_s, chance.choice(tokens), decode_s))
    return asked


@dataclass(slots=True, eq=False)
class Decoding:
    """A request at a PD instance."""

    asked: Asked
    using: InFlight
    ends_s: float = 0.0


@dataclass
class EncodeFleet:
    """The fleet.

    Attributes:
        rule: rule of the policy; None to encode all items on encode instances.
        encoders: number of encode instances.
        decoders: number of PD instances.
        now_s: simulated time.
        seconds: time from arrival to the end of decode, of each request.
        left: number of items that a PD instance encoded.
    """

    rule: ItemRule | None
    encoders: int = 1
    decoders: int = 2
    now_s: float = 0.0
    seconds: list[float] = field(default_factory=list)
    left: int = 0

    def __post_init__(self) -> None:
        clock = self._clock
        encodes = [Instance(Role.ENCODE, f"http://e{n}:1") for n in range(self.encoders)]
        decodes = [Instance(Role.PREFILL_DECODE, f"http://pd{n}:1") for n in range(self.decoders)]
        self.table = InstanceTable([*encodes, *decodes], clock=clock)
        access = StoreAccess(self.table)
        for one in decodes:
            access.record_writes(one, writes=True)
        self._placement = Placement(self.table, access)
        self._encodes = Choice(self.table, Role.ENCODE)
        self._decodes = Choice(self.table, Role.PREFILL_DECODE)
        self._free_s = dict.fromkeys([*encodes, *decodes], 0.0)
        self._running: dict[Instance, set[Decoding]] = {one: set() for one in decodes}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    @property
    def mean_s(self) -> float:
        return sum(self.seconds) / len(self.seconds)

    def run(self, requests: Sequence[Asked]) -> "EncodeFleet":
        """Run until all requests have ended."""
        for asked in requests:
            self._run_at(asked.at_s, partial(self._arrive, asked))
        while self._events:
            self.now_s, _, call = heapq.heappop(self._events)
            call()
        assert len(self.seconds) == len(requests)
        return self

    def _clock(self) -> float:
        return self.now_s

    def _run_at(self, at_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), call))

    def _arrive(self, asked: Asked) -> None:
        if not asked.tokens:
            self._decode(asked, 0)
            return
        placed = self.place_item(asked.tokens)
        assert placed.tokens == asked.tokens
        if placed.at_consumer:
            self.left += 1
            self._decode(asked, asked.tokens)
            return
        chosen = self._encodes.best_instance(prefer=placed.first_url)
        using = self.table.track_request(chosen, work=Work(0, placed.tokens)).begin_request()
        begins_s = max(self.now_s, self._free_s[chosen])
        self._free_s[chosen] = ends_s = begins_s + REQUEST_S + TOKEN_S * asked.tokens
        self._run_at(ends_s, partial(self._encoded, asked, using))

    def place_item(self, tokens: int) -> MissingItem:
        """Return a picture of this many tokens with its place, of a request that arrives now."""
        [placed] = self.place_items(tokens)
        return placed

    def place_items(self, *tokens: int) -> Sequence[MissingItem]:
        """Return pictures of so many tokens with their places, of one request that arrives now."""
        items = [
            MMItem(
                ("messages", 0, "content", number),
                "image_url",
                image(),
                content_key=f"key-{number}",
                pixels=each * PIXELS_PER_TOKEN,
            )
            for number, each in enumerate(tokens)
        ]
        request = Request("r", {}, CONFIG, body={"model": "m"}, items=items)
        job = EncodeJob(Attempt(request, Course(items=self.rule), []))
        missing = [
            MissingItem(item, None, EntryKey("n", item.identity), predict_tokens(item))
            for item in items
        ]
        return self._placement.place_items(job, missing)

    def _encoded(self, asked: Asked, using: InFlight) -> None:
        using.end_request()
        self._decode(asked, 0)

    def _decode(self, asked: Asked, tokens: int) -> None:
        """Encode the tokens, which delays all decodes of the instance, then decode."""
        chosen = self._decodes.best_instance()
        using = self.table.track_request(chosen, work=Work(0, tokens)).begin_request()
        begins_s = max(self.now_s, self._free_s[chosen])
        encode_s = TOKEN_S * tokens
        if tokens:
            self._free_s[chosen] = begins_s + encode_s
            for other in self._running[chosen]:
                other.ends_s += encode_s
        decoding = Decoding(asked, using, begins_s + encode_s + asked.decode_s)
        self._running[chosen].add(decoding)
        self._run_at(begins_s + encode_s, using.record_answer)
        self._run_at(decoding.ends_s, partial(self._end, chosen, decoding))

    def _end(self, chosen: Instance, decoding: Decoding) -> None:
        if decoding.ends_s > self.now_s:  # delayed since
            self._run_at(decoding.ends_s, partial(self._end, chosen, decoding))
            return
        self._running[chosen].remove(decoding)
        decoding.using.end_request()
        self.seconds.append(self.now_s - decoding.asked.at_s)
