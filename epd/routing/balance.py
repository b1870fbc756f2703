"""Which instance a request goes to: small pure balances, chosen by name."""

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, Protocol

from epd.errors import NoInstance
from epd.routing.instances import Instance, InstanceTable, Role

LOAD_FACTOR = 1.25
"""How far above the mean an instance may be loaded before its keys go elsewhere (Mirrokni et al.,
Consistent Hashing with Bounded Loads, 2016)."""

BalanceName = Literal["affinity", "round_robin", "least_load"]


class Balance(Protocol):
    """Puts instances in the order in which an item tries them."""

    def order(
        self, instances: Sequence[Instance], key: str, load: Mapping[Instance, int]
    ) -> list[Instance]:
        """All instances, the best first.

        Args:
            instances: the candidates.
            key: the item's.
            load: requests under way, by instance.
        """


class RoundRobin:
    """Each in turn. The turn goes on from request to request."""

    def __init__(self) -> None:
        self._turn = 0

    def order(
        self, instances: Sequence[Instance], key: str, load: Mapping[Instance, int]
    ) -> list[Instance]:
        """See `Balance`."""
        del key, load
        start = self._turn % len(instances) if instances else 0
        self._turn = start + 1
        return [*instances[start:], *instances[:start]]


class LeastLoad:
    """The one with the fewest requests under way; of equals, each in turn."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def order(
        self, instances: Sequence[Instance], key: str, load: Mapping[Instance, int]
    ) -> list[Instance]:
        """See `Balance`."""
        turns = self._turns.order(instances, key, load)
        return sorted(turns, key=lambda instance: load.get(instance, 0))


class Affinity:
    """A key goes to the same instance, whose own caches know it, unless that has too much to do.

    Rendezvous hashing: when an instance comes or goes, only its own keys move. Proxies that know
    the same instances agree without talking to each other.
    """

    def order(
        self, instances: Sequence[Instance], key: str, load: Mapping[Instance, int]
    ) -> list[Instance]:
        """See `Balance`."""
        ranked = sorted(instances, key=lambda instance: _score(instance, key), reverse=True)
        under_way = sum(load.get(instance, 0) for instance in instances)
        most = math.ceil(LOAD_FACTOR * (under_way + 1) / max(1, len(instances)))
        return sorted(ranked, key=lambda instance: load.get(instance, 0) >= most)


BALANCES: Mapping[BalanceName, type[Balance]] = {
    "affinity": Affinity,
    "round_robin": RoundRobin,
    "least_load": LeastLoad,
}


class Choice:
    """Whom the next request of a stage goes to: of those that are fit, the balance's first."""

    def __init__(self, table: InstanceTable, balance: BalanceName, *roles: Role) -> None:
        """Choose among the instances of these roles; the first one's name is the stage's."""
        self._table = table
        self._roles = roles
        self._balance: Balance = BALANCES[balance]()

    def use(self, balance: BalanceName) -> None:
        """Go by this balance, anew where it is another."""
        if type(self._balance) is not BALANCES[balance]:
            self._balance = BALANCES[balance]()

    def best(self, key: str = "", tried: Collection[Instance] = ()) -> Instance:
        """An instance, one that has not been tried where there is one.

        Args:
            key: what the request is about, for a balance that goes by it.
            tried: instances that this request has been sent to.

        Raises:
            NoInstance: there is none.
        """
        usable = self._table.usable(*self._roles)
        if not usable:
            stage = self._roles[0]
            raise NoInstance(f"there is no {stage} instance", slug=f"no_{stage}")
        candidates: Sequence[Instance] = usable
        if tried:
            candidates = self._fresh(usable, tried) or usable
        if len(candidates) == 1:
            return candidates[0]
        return self._balance.order(candidates, key, self._table.load)[0]

    def others(self, tried: Collection[Instance]) -> bool:
        """Whether there is one that has not been tried."""
        return bool(self._fresh(self._table.usable(*self._roles), tried))

    def _fresh(self, usable: Sequence[Instance], tried: Collection[Instance]) -> Sequence[Instance]:
        """Those that have not been tried: the usable ones, and where there are none all others.

        Who was left alone may be back and not yet have been asked, and costs little to find away.
        """
        fresh = [one for one in usable if one not in tried]
        return fresh or [one for one in self._table.of(*self._roles) if one not in tried]


def _score(instance: Instance, key: str) -> bytes:
    return hashlib.blake2b(f"{instance.url}\n{key}".encode(), digest_size=8).digest()
