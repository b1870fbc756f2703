"""When and how `chaos.py` breaks things, and which errors that excuses.

The rules are docs/faults.md's: what an encode instance or the store does is never an error of a
request; what prefill and decode do is one where no other instance could be asked any more.
"""

import asyncio
import itertools
import math
import random
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from epd.routing.instances import Role
from scripts.chaos_fleet import Breakable, Instance
from scripts.chaos_load import Outcome
from scripts.chaos_proxy import Cut, Kill, Worker

MOST_AT_ONCE = 3
PAUSE_S, LASTS_S = (0.2, 2.0), (0.5, 4.0)

AFTERMATH_S = 3.0
"""How long after its end a fault is still felt: connections to be found dead, probes to be due."""

SUSPECTED, SUSPECTED_S = "suspected_fatal", 5.0
"""The slug of a request, or of an item, that instances died of; and for how long after the end of
the first fault it may be: `--suspect-s` for the second death to come, and once more after it."""

DOWN_S = 1.0
"""How long an instance that was killed stays away, where one of each role is."""

GOES_AWAY = frozenset({"kill", "reset", "break", "truncate"})
SAYS_NOTHING = frozenset({"stop", "hang", "stall", "dribble"})
REFUSES = frozenset({"error", "busy", "overloaded"})

ANY = GOES_AWAY | SAYS_NOTHING | REFUSES | {"sick", "nonsense"}

SLUGS = {
    "failed": GOES_AWAY | REFUSES | {"stop"},
    "timeout": SAYS_NOTHING,
    "rejected": REFUSES,
    "overloaded": REFUSES,
    "bad_response": GOES_AWAY | {"nonsense"},
    "died": GOES_AWAY,
    "stalled": SAYS_NOTHING,
    "truncated": frozenset({"truncate"}),
}
"""Faults of an instance by the end of the slug that they excuse."""

EVENTS = {502: GOES_AWAY, 504: SAYS_NOTHING}
"""Faults by the code of the error event that they excuse: it has no slug."""

AFTER_ENCODE = {Role.PREFILL.value, Role.DECODE.value, Role.PREFILL_DECODE.value}

NEVER = ("internal_error", "encode_", "no_encoder", "no_store", "unknown_media", "prefill_no_kv")
"""Slugs, or their beginnings, of what no fault excuses."""


@dataclass
class Fault:
    """Something that was broken for a while.

    Attributes:
        kind: how.
        role: of what: an instance's role, or `store`.
        name: what it was.
        began_s: since when, on the loop's clock.
        ended_s: until when.
    """

    kind: str
    role: str
    name: str
    began_s: float
    ended_s: float = math.inf

    @property
    def of_death(self) -> bool:
        """Whether it looks as an instance's death does."""
        return self.kind in GOES_AWAY and self.role in {*AFTER_ENCODE, Role.ENCODE.value}

    def felt(self, outcome: Outcome) -> bool:
        """Whether a request may have felt it."""
        after_s = SUSPECTED_S if outcome.slug == SUSPECTED else AFTERMATH_S
        return self.began_s <= outcome.ended_s and outcome.began_s <= self.ended_s + after_s


class Faults:
    """What has been broken so far."""

    def __init__(self) -> None:
        """Nothing has."""
        self.seen: list[Fault] = []

    async def put(self, target: Breakable, kind: str, seconds: float) -> None:
        """Break something for a while."""
        clock = asyncio.get_running_loop().time
        fault = Fault(kind, target.role, target.name, clock())
        self.seen.append(fault)
        async with target.broken(kind):
            await asyncio.sleep(seconds)
        fault.ended_s = clock()


@dataclass(frozen=True)
class Planned:
    """Something to be broken: what, how, when and for how long, in seconds."""

    target: Breakable
    kind: str
    at_s: float
    lasts_s: float


def plan(targets: Sequence[Breakable], rng: random.Random, seconds: float) -> list[Planned]:
    """What breaks in so many seconds: here and there, a few at once, each one way at a time."""
    lanes = [0.0] * min(MOST_AT_ONCE, len(targets) - 1)
    whole_at = [0.0] * len(targets)
    planned = []
    while min(lanes) < seconds:
        lane = lanes.index(min(lanes))
        at_s = lanes[lane] + rng.uniform(*PAUSE_S)
        place = rng.choice([place for place, free_s in enumerate(whole_at) if free_s <= at_s])
        target, lasts_s = targets[place], rng.uniform(*LASTS_S)
        planned.append(Planned(target, rng.choice(target.kinds), at_s, lasts_s))
        lanes[lane] = whole_at[place] = at_s + lasts_s
    return [one for one in planned if one.at_s < seconds]


async def storm(faults: Faults, planned: Sequence[Planned]) -> None:
    """Break what is planned; in the end all is whole."""
    # What was killed may take longer to come back than was planned.
    turns = {one.target.name: asyncio.Lock() for one in planned}

    async def put(one: Planned) -> None:
        await asyncio.sleep(one.at_s)
        async with turns[one.target.name]:
            await faults.put(one.target, one.kind, one.lasts_s)

    async with asyncio.TaskGroup() as group:
        for one in planned:
            group.create_task(put(one))


async def kill_workers(faults: Faults, planned: Sequence[Kill]) -> None:
    """Kill workers as planned; in the end all serve again."""

    async def put(one: Kill) -> None:
        await asyncio.sleep(one.at_s)
        await faults.put(one.worker, "kill", 0.0)

    async with asyncio.TaskGroup() as group:
        for one in planned:
            group.create_task(put(one))


async def kills(
    faults: Faults, instances: Sequence[Instance], every_s: float, until: asyncio.Event
) -> None:
    """Kill one instance of each role, in turn, again and again; all are back before the next."""
    clock = asyncio.get_running_loop().time
    groups = [
        list(group) for _, group in itertools.groupby(sorted(instances, key=_role), key=_role)
    ]
    due_s = clock()
    for turn in itertools.count():
        due_s = max(due_s + every_s, clock())
        if await _waited(until, due_s - clock()):
            return
        async with asyncio.TaskGroup() as group:
            for several in groups:
                group.create_task(faults.put(several[turn % len(several)], "kill", DOWN_S))


def _role(instance: Instance) -> str:
    return instance.role


async def _waited(until: asyncio.Event, seconds: float) -> bool:
    with suppress(TimeoutError):
        await asyncio.wait_for(until.wait(), seconds)
    return until.is_set()


def cut_by(outcome: Outcome, cuts: Iterable[Cut]) -> bool:
    """Whether a request's connection was one of those of a worker that was killed."""
    return outcome.result == "cut off" and any(
        outcome.began_s <= cut.at_s <= outcome.ended_s and outcome.port in cut.ports for cut in cuts
    )


def excused(outcome: Outcome, faults: Iterable[Fault]) -> bool:
    """Whether one of the faults that a request felt may end it in this error."""
    if outcome.slug.startswith(NEVER):
        return False
    if outcome.slug == SUSPECTED:
        return len({fault.name for fault in faults if fault.of_death}) > 1
    at_work = [fault for fault in faults if fault.role in AFTER_ENCODE]
    return any(
        fault.kind in _kinds(outcome, of_prefill=fault.role == Role.PREFILL) for fault in at_work
    )


def _kinds(outcome: Outcome, *, of_prefill: bool) -> Container[str]:
    """The kinds of faults of prefill, or of decode, that excuse an error."""
    if outcome.result == "broken off":
        return () if of_prefill else EVENTS.get(outcome.status, ())
    stage, _, ending = outcome.slug.partition("_")
    if stage not in {"prefill", "decode"} or ending not in SLUGS:
        return ANY
    if stage == "decode" and of_prefill:
        return GOES_AWAY | SAYS_NOTHING  # what it has made cannot be fetched any more
    return SLUGS[ending] if of_prefill == (stage == "prefill") else ()


def had_another(outcome: Outcome, faults: Iterable[Fault]) -> bool:
    """Whether each role after encode had an instance that was sound all the while.

    There are two of each.
    """
    broken = {(fault.role, fault.name) for fault in faults if fault.role in AFTER_ENCODE}
    begun = outcome.result == "broken off" or outcome.slug == "decode_died"
    return not begun and all(count == 1 for count in Counter(role for role, _ in broken).values())


def excused_by_a_kill(outcome: Outcome, faults: Iterable[Fault]) -> bool:
    """Whether a request may end in this error though its other instances live.

    It may where its answer had begun, and where it lived to see another kill than the first.
    """
    kills_of = Counter(
        fault.role
        for fault in faults
        if fault.role != Worker.role
        and outcome.began_s - AFTERMATH_S <= fault.began_s <= outcome.ended_s
    )
    begun = outcome.result == "broken off" or outcome.slug == "decode_died"
    return max(kills_of.values(), default=0) > (0 if begun else 1)
