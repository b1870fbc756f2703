"""Fault injection of `chaos.py`, and the errors that a fault excuses.

The rules are those of docs/faults.md. A fault of an encode instance or of the store never fails a
request. A fault of prefill or decode fails a request only if no other instance could be tried.
"""

import asyncio
import math
import random
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from epd.routing.instances import Role
from scripts.chaos_fleet import Breakable
from scripts.chaos_load import Outcome
from scripts.chaos_proxy import Cut

MOST_AT_ONCE = 3
PAUSE_S, LASTS_S = (0.2, 2.0), (0.5, 4.0)

FIRST_KILL_S, NEXT_KILL_S = (2.0, 8.0), (35.0, 60.0)
"""Ranges of the first kill of a worker and of the interval to the next one, in seconds. A worker
that dies five times within 30 s of its start ends the proxy."""

AFTERMATH_S = 3.0
"""Time for which a fault has effects after its end, in seconds: broken connections, late probes."""

SUSPECTED, SUSPECTED_S = "suspected_fatal", 5.0
"""Slug of a request, or of an item, that killed instances, and the seconds for which it may occur
after the end of the first fault: `--suspect-s` until the second death, and again after it."""

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
"""Faults of an instance, by the end of the slug that they excuse."""

EVENTS = {502: GOES_AWAY, 504: SAYS_NOTHING}
"""Faults, by the code of the error event that they excuse: an event has no slug."""

AFTER_ENCODE = {Role.PREFILL.value, Role.DECODE.value, Role.PREFILL_DECODE.value}

NEVER = ("internal_error", "encode_", "no_encoder", "no_store", "unknown_media", "prefill_no_kv")
"""Slugs, or their prefixes, that no fault excuses."""


@dataclass
class Fault:
    """Fault of an instance or the store for some time.

    Attributes:
        kind: kind of the fault.
        role: role of the instance, or `store`.
        name: name of the target.
        began_s: start on the loop's clock, in seconds.
        ended_s: end on the same clock.
    """

    kind: str
    role: str
    name: str
    began_s: float
    ended_s: float = math.inf

    @property
    def of_death(self) -> bool:
        """Return whether the fault looks like the death of an instance."""
        return self.kind in GOES_AWAY and self.role in {*AFTER_ENCODE, Role.ENCODE.value}

    def felt(self, outcome: Outcome) -> bool:
        after_s = SUSPECTED_S if outcome.slug == SUSPECTED else AFTERMATH_S
        return self.began_s <= outcome.ended_s and outcome.began_s <= self.ended_s + after_s


class Faults:
    """Faults that have been injected so far."""

    def __init__(self) -> None:
        self.seen: list[Fault] = []

    async def put(self, target: Breakable, kind: str, seconds: float) -> None:
        clock = asyncio.get_running_loop().time
        fault = Fault(kind, target.role, target.name, clock())
        self.seen.append(fault)
        async with target.broken(kind):
            await asyncio.sleep(seconds)
        fault.ended_s = clock()


@dataclass(frozen=True)
class Planned:
    """Planned fault: its target, kind, start and duration, in seconds."""

    target: Breakable
    kind: str
    at_s: float
    lasts_s: float


def plan(targets: Sequence[Breakable], rng: random.Random, seconds: float) -> list[Planned]:
    """Return random faults for this number of seconds.

    At most `MOST_AT_ONCE` faults overlap, and each target has at most one at a time.
    """
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
    return [fault for fault in planned if fault.at_s < seconds]


def kills_of_workers(
    workers: Sequence[Breakable], rng: random.Random, seconds: float
) -> list[Planned]:
    """Return random kills of each worker, rare enough for the proxy to keep running."""
    planned = []
    for worker in workers:
        at_s = rng.uniform(*FIRST_KILL_S)
        while at_s < seconds:
            planned.append(Planned(worker, "kill", at_s, 0.0))
            at_s += rng.uniform(*NEXT_KILL_S)
    return planned


async def storm(faults: Faults, planned: Sequence[Planned]) -> None:
    """Inject the planned faults; all have ended when this returns."""
    # A killed process may need longer to restart than planned.
    turns = {fault.target.name: asyncio.Lock() for fault in planned}

    async def put(fault: Planned) -> None:
        await asyncio.sleep(fault.at_s)
        async with turns[fault.target.name]:
            await faults.put(fault.target, fault.kind, fault.lasts_s)

    async with asyncio.TaskGroup() as group:
        for fault in planned:
            group.create_task(put(fault))


def cut_by(outcome: Outcome, cuts: Iterable[Cut]) -> bool:
    """Return whether the request's connection belonged to a worker that was killed."""
    return outcome.result == "cut off" and any(
        outcome.began_s <= cut.at_s <= outcome.ended_s and outcome.port in cut.ports for cut in cuts
    )


def excused(outcome: Outcome, faults: Iterable[Fault]) -> bool:
    """Return whether one of the faults that affected a request excuses its error."""
    if outcome.slug.startswith(NEVER):
        return False
    if outcome.slug == SUSPECTED:
        return len({fault.name for fault in faults if fault.of_death}) > 1
    at_work = [fault for fault in faults if fault.role in AFTER_ENCODE]
    return any(
        fault.kind in _kinds(outcome, of_prefill=fault.role == Role.PREFILL) for fault in at_work
    )


def _kinds(outcome: Outcome, *, of_prefill: bool) -> Container[str]:
    """Return the kinds of faults of prefill, or of decode, that excuse an error."""
    if outcome.result == "broken off":
        return () if of_prefill else EVENTS.get(outcome.status, ())
    stage, _, ending = outcome.slug.partition("_")
    if stage not in {"prefill", "decode"} or ending not in SLUGS:
        return ANY
    if stage == "decode" and of_prefill:
        return GOES_AWAY | SAYS_NOTHING  # its KV blocks can no longer be fetched
    return SLUGS[ending] if of_prefill == (stage == "prefill") else ()
