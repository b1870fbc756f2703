"""The choice of the instance for a request, by one of several pure balancing algorithms."""

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Protocol

from epd.errors import NoInstance
from epd.routing import BalanceName, ItemBalanceName
from epd.routing.instances import Instance, Role
from epd.routing.load import Load
from epd.routing.prefix import NO_PREFIX, Prefix
from epd.routing.rendezvous import cheapest_engine, distances, upper_bound
from epd.routing.table import Candidate, InstanceTable

MAX_OWED = 4096
_share, _pressure = attrgetter("share"), attrgetter("pressure")


class Balance(Protocol):
    """Selects one of several instances, by their loads and weights."""

    def pick_load(self, loads: Sequence[Load], key: str) -> Load:
        """Return one of at least two loads. `key` is the request's affinity key; empty for none."""


class RoundRobin:
    """Selects each in turn, in proportion to its weight, without bursts.

    This is nginx's smooth weighted round-robin: each selection adds the weight of each instance to
    its credit, selects the highest credit, and subtracts the sum of all weights from it.
    """

    def __init__(self, max_owed: int = MAX_OWED) -> None:
        """Start without credit. Remember at most `max_owed` instances, removed ones included."""
        self._max_owed = max_owed
        self._owed: dict[Load, float] = {}

    def pick_load(self, loads: Sequence[Load], key: str = "") -> Load:  # noqa: ARG002
        owed = self._owed
        if len(owed) > self._max_owed:  # many have been removed
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
    """Selects the lowest load for its weight; equal ones in turn."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def pick_load(self, loads: Sequence[Load], key: str = "") -> Load:  # noqa: ARG002
        least = min(map(_pressure, loads))
        equals = [load for load in loads if load.pressure == least]
        return equals[0] if len(equals) == 1 else self._turns.pick_load(equals)


class PowerOfTwo:
    """Selects the lower load of two random candidates, drawn by weight.

    Proxies with the same information then do not all select the same instance (Mitzenmacher, The
    Power of Two Choices in Randomized Load Balancing, 2001).
    """

    def __init__(self, chance: random.Random | None = None) -> None:
        self._chance = chance or random.Random()  # noqa: S311 - no secret

    def pick_load(self, loads: Sequence[Load], key: str = "") -> Load:  # noqa: ARG002
        first = self._draw(loads)
        other = self._draw([load for load in loads if load is not first])
        return other if other.pressure < first.pressure else first

    def _draw(self, loads: Sequence[Load]) -> Load:
        return self._chance.choices(loads, list(map(_share, loads)))[0]


class Rendezvous:
    """Maps a key to the same instance, which has the item in its caches, unless it is overloaded.

    Proxies with the same instances agree without communication (`epd.routing.rendezvous`). A
    request without a key goes to the lowest load.
    """

    def __init__(self) -> None:
        self._keyless = LeastLoad()

    def pick_load(self, loads: Sequence[Load], key: str) -> Load:
        if not key:
            return self._keyless.pick_load(loads)
        far = distances(loads, key.encode("utf-8", "surrogatepass"))
        nearest = min(far)
        first = loads[far.index(nearest)]
        most = upper_bound(loads)
        if first.value < most(first):
            return first
        by_distance = zip(far, loads, strict=True)
        room = [(away, load) for away, load in by_distance if load.value < most(load)]
        return min(room, key=lambda pair: pair[0])[1]


BALANCES: Mapping[BalanceName | ItemBalanceName, Callable[[], Balance]] = {
    "affinity": Rendezvous,
    "content": LeastLoad,  # of requests without a prefix
    "session": Rendezvous,
    "round_robin": RoundRobin,
    "least_load": LeastLoad,
    "power_of_two": PowerOfTwo,
}


class Choice:
    """Selects an instance for the next request of a stage, among the usable ones.

    Attributes:
        roles: roles of the instances.
    """

    def __init__(
        self,
        table: InstanceTable,
        *roles: Role,
        balances: Mapping[BalanceName | ItemBalanceName, Balance] | None = None,
        fits: Callable[[Instance], bool] | None = None,
    ) -> None:
        """Choose among the instances of these roles that meet a predicate; None for all.

        The first role is the name of the stage. `balances` are the algorithms, with their state.
        """
        self.roles = roles
        self._table = table
        self._balances = balances or {name: make() for name, make in BALANCES.items()}
        self._fits = fits

    def among(self, fits: Callable[[Instance], bool] | None) -> "Choice":
        """Return this choice among the instances that also meet a predicate; None for all."""
        if fits is None:
            return self
        before = self._fits
        both = fits if before is None else lambda each: before(each) and fits(each)
        return Choice(self._table, *self.roles, balances=self._balances, fits=both)

    def best_instance(  # noqa: PLR0913 - the inputs of a choice
        self,
        tried: Collection[Instance] = (),
        *,
        balance: BalanceName | ItemBalanceName = "least_load",
        item: str = "",
        session: str = "",
        prefix: Prefix = NO_PREFIX,
        prefer: str | None = None,
        worth: Callable[[Instance], float] | None = None,
    ) -> Instance:
        """Return an instance, if possible one that has not been tried.

        Args:
            tried: instances to which this request has been sent.
            balance: name of the algorithm.
            item: key of the item, for `affinity`.
            session: affinity key of the request, for `session`.
            prefix: prompt of the request, for `content`.
            prefer: URL of the preferred instance, used unless it is overloaded or drained.
            worth: what an instance saves of this request: those that save most are chosen from,
                without the overloaded ones; None: all save the same.

        Raises:
            NoInstance: there is no such instance.
        """
        candidates = usable = self._usable()
        if tried:
            candidates = self._untried(tried) or usable
        if len(candidates) == 1:
            return candidates[0].instance
        loads = [candidate.load for candidate in candidates]
        for candidate in candidates if prefer is not None else ():
            load = candidate.load
            if candidate.instance.url == prefer and load.value <= upper_bound(loads)(load):
                return candidate.instance
        if worth is not None:
            candidates = _worthiest(candidates, worth, upper_bound(loads))
            loads = [candidate.load for candidate in candidates]
            if len(candidates) == 1:
                return candidates[0].instance
        if prefix.links:
            instances = {
                engine: candidate.instance
                for candidate in candidates
                for engine in candidate.load.engines
            }
            return instances[cheapest_engine([*instances], prefix)]
        picked = self._balances[balance].pick_load(loads, session if balance == "session" else item)
        return candidates[loads.index(picked)].instance

    def has_untried(self, tried: Collection[Instance]) -> bool:
        return bool(self._untried(tried))

    def has_untried_usable(self, tried: Collection[Instance]) -> bool:
        """Return whether one of the untried instances may get the next request."""
        usable = self._fitting(self._table.usable_candidates(*self.roles))
        return any(candidate.instance not in tried for candidate in usable)

    def _usable(self) -> Sequence[Candidate]:
        usable = self._fitting(self._table.usable_candidates(*self.roles))
        if not usable:
            stage = self.roles[0]
            fitting = (
                ""
                if self._fits is None
                else " with the namespace of the request's consumer and within its reach"
            )
            raise NoInstance(f"there is no {stage} instance{fitting}", slug=f"no_{stage}")
        return usable

    def _untried(self, tried: Collection[Instance]) -> Sequence[Candidate]:
        """Return the untried ones among the usable instances, or else among all.

        An ejected instance may have recovered before its next probe; trying it is cheap.
        """
        usable = self._table.usable_candidates(*self.roles)
        for candidates in (usable, self._table.all(*self.roles)):
            fresh = [candidate for candidate in candidates if candidate.instance not in tried]
            if fitting := self._fitting(fresh):
                return fitting
        return ()

    def _fitting(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        if (fits := self._fits) is None:
            return candidates
        return [candidate for candidate in candidates if fits(candidate.instance)]


def _worthiest(
    candidates: Sequence[Candidate],
    worth: Callable[[Instance], float],
    bound: Callable[[Load], int],
) -> Sequence[Candidate]:
    """Return the candidates with the highest worth, among those that are not overloaded."""
    room = [
        (worth(candidate.instance), candidate)
        for candidate in candidates
        if candidate.load.value < bound(candidate.load)
    ]
    most = max(value for value, _ in room)
    return [candidate for value, candidate in room if value == most] if most > 0 else candidates
