"""Which instance a request goes to: small pure balances, chosen by name."""

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Literal, Protocol

from xxhash import xxh3_64_intdigest

from epd.errors import NoInstance
from epd.routing.instances import Instance, Role
from epd.routing.load import Load
from epd.routing.table import Candidate, InstanceTable

LOAD_FACTOR = 1.25
"""How far above its share an instance may be loaded before its keys go elsewhere (Mirrokni et al.,
Consistent Hashing with Bounded Loads, 2016)."""

OUTLIER = 2.0
"""How far above the usual load a report may be and still count whole: one that is wrong, or whose
instance hangs, must not let all others be loaded without bound."""

BalanceName = Literal["session", "round_robin", "least_load", "power_of_two"]
ItemBalanceName = Literal["affinity", "session", "round_robin", "least_load", "power_of_two"]
"""Of encode instances, where what is asked for has a key of its own."""

MAX_OWED = 4096
"""How many instances a round-robin remembers, those that have gone among them."""

_value, _share, _pressure = attrgetter("value"), attrgetter("share"), attrgetter("pressure")


class Balance(Protocol):
    """Picks one of several, by what they have to do and their weights."""

    def pick(self, loads: Sequence[Load], key: str) -> Load:
        """One of them.

        Args:
            loads: the candidates', two at least.
            key: what the request is about; empty: nothing that others are about too.
        """


class RoundRobin:
    """Each in turn, and as often as its weight says, without bursts.

    That is nginx's smooth weighted round-robin: what one is owed grows by its weight each time, and
    who is owed most is picked, and then owes the sum of all weights.
    """

    def __init__(self) -> None:
        self._owed: dict[Load, float] = {}

    def pick(self, loads: Sequence[Load], key: str = "") -> Load:
        """See `Balance`."""
        del key
        owed = self._owed
        if len(owed) > MAX_OWED:  # many have gone
            owed = self._owed = {load: owed.get(load, 0.0) for load in loads}
        total, best, most = 0.0, loads[0], -math.inf
        for load in loads:
            share = load.share
            total += share
            owed[load] = now = owed.get(load, 0.0) + share
            if now > most:
                best, most = load, now
        owed[best] = most - total
        return best


class LeastLoad:
    """The one with the least to do for its weight; of equals, each in turn."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def pick(self, loads: Sequence[Load], key: str = "") -> Load:
        """See `Balance`."""
        del key
        least = min(map(_pressure, loads))
        equals = [load for load in loads if load.pressure == least]
        return equals[0] if len(equals) == 1 else self._turns.pick(equals)


class PowerOfTwo:
    """Of two at random, by their weights, the one with less to do.

    Proxies that know the same do not all send their next request to the same instance
    (Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001).
    """

    def __init__(self, chance: random.Random | None = None) -> None:
        self._chance = chance or random.Random()  # noqa: S311 - no secret

    def pick(self, loads: Sequence[Load], key: str = "") -> Load:
        """See `Balance`."""
        del key
        one = self._one(loads)
        other = self._one([load for load in loads if load is not one])
        return other if other.pressure < one.pressure else one

    def _one(self, loads: Sequence[Load]) -> Load:
        return self._chance.choices(loads, list(map(_share, loads)))[0]


class Rendezvous:
    """A key goes to the same instance, whose own caches know it, unless that has too much to do.

    When an instance comes or goes, only its own keys move; where weights change, only as many as
    have to (weighted rendezvous hashing: Schindelhauer and Schomaker, Weighted Distributed Hash
    Tables, 2005). Proxies that know the same instances agree without talking to each other. What
    has no key goes to the one with the least to do.
    """

    def __init__(self) -> None:
        self._keyless = LeastLoad()

    def pick(self, loads: Sequence[Load], key: str) -> Load:
        """See `Balance`."""
        if not key:
            return self._keyless.pick(loads)
        far = _distances(loads, key.encode("utf-8", "surrogatepass"))
        nearest = min(far)
        first = loads[far.index(nearest)]
        most = _most(loads)
        if first.value < most(first):
            return first
        room = [(away, load) for away, load in zip(far, loads, strict=True)]
        room = [one for one in room if one[1].value < most(one[1])]
        return min(room, key=lambda one: one[0])[1]


def _distances(loads: Sequence[Load], key: bytes) -> list[float]:
    """Of each from a key: exponentially distributed, its rate the instance's weight."""
    log, digest = math.log, xxh3_64_intdigest
    return [-log((digest(key, load.seed) + 1) * 2.0**-64) / load.share for load in loads]


def _most(loads: Sequence[Load]) -> Callable[[Load], int]:
    """How much an instance may have to do before its keys go elsewhere: there is always room.

    What an instance only says of itself counts up to `OUTLIER` times what half of them have at
    most, and a request more. That is above the least that one has, which so is below the bound.
    """
    shares, pressures = sum(map(_share, loads)), sorted(map(_pressure, loads))
    usual = OUTLIER * (pressures[(len(loads) - 1) // 2] + len(loads) / shares)
    if pressures[-1] <= usual:
        requests: float = sum(map(_value, loads))
    else:
        requests = sum(min(one.value, max(one.under_way, usual * one.share)) for one in loads)
    each = LOAD_FACTOR * (requests + 1) / shares
    return lambda load: math.ceil(each * load.share)


BALANCES: Mapping[ItemBalanceName, Callable[[], Balance]] = {
    "affinity": Rendezvous,
    "session": Rendezvous,
    "round_robin": RoundRobin,
    "least_load": LeastLoad,
    "power_of_two": PowerOfTwo,
}


class Choice:
    """Whom the next request of a stage goes to: one of those that are fit."""

    def __init__(self, table: InstanceTable, *roles: Role) -> None:
        """Choose among the instances of these roles; the first one's name is the stage's."""
        self._table = table
        self._roles = roles
        self._balances: dict[ItemBalanceName, Balance] = {}

    def best(  # noqa: PLR0913 - what a request is chosen by
        self,
        tried: Collection[Instance] = (),
        *,
        balance: ItemBalanceName = "least_load",
        item: str = "",
        session: str = "",
        prefer: str | None = None,
        fits: Callable[[Instance], bool] | None = None,
    ) -> Instance:
        """An instance, one that has not been tried where there is one.

        Args:
            tried: instances that this request has been sent to.
            balance: names what it is chosen by.
            item: the key of what it is about, for `affinity`.
            session: whose request it is one of, for `session`.
            prefer: URL of the one that it goes to unless that has too much to do, or is drained.
            fits: tells which instances can serve this request; None: all.

        Raises:
            NoInstance: there is none.
        """
        usable = self._table.usable(*self._roles)
        if fits is not None:
            usable = [one for one in usable if fits(one.instance)]
        if not usable:
            stage = self._roles[0]
            fitting = "" if fits is None else " of its consumer's namespace"
            raise NoInstance(f"there is no {stage} instance{fitting}", slug=f"no_{stage}")
        candidates = usable
        if tried:
            candidates = self._fresh(usable, tried) or usable
        if len(candidates) == 1:
            return candidates[0].instance
        loads = [one.load for one in candidates]
        for one in candidates if prefer is not None else ():
            if one.instance.url == prefer and one.load.value <= _most(loads)(one.load):
                return one.instance
        if balance not in self._balances:
            self._balances[balance] = BALANCES[balance]()
        picked = self._balances[balance].pick(loads, session if balance == "session" else item)
        return candidates[loads.index(picked)].instance

    def others(
        self, tried: Collection[Instance], fits: Callable[[Instance], bool] | None = None
    ) -> bool:
        """Whether there is one that has not been tried."""
        fresh = self._fresh(self._table.usable(*self._roles), tried)
        return bool(fresh) if fits is None else any(fits(one.instance) for one in fresh)

    def _fresh(
        self, usable: Sequence[Candidate], tried: Collection[Instance]
    ) -> Sequence[Candidate]:
        """Those that have not been tried: the usable ones, and where there are none all others.

        Who was left alone may be back and not yet have been asked, and costs little to find away.
        """
        fresh = [one for one in usable if one.instance not in tried]
        return fresh or [one for one in self._table.all(*self._roles) if one.instance not in tried]
