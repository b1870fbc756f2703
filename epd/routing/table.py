"""Which of the instances are fit for the next request: how each does, and what each has to do."""

import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from epd.routing.health import DEFAULT_HEALTH, Health, HealthPolicy, State
from epd.routing.instances import CONSUMERS, Instance, Role
from epd.routing.load import Load, Report
from epd.routing.ranks import Ranks
from epd.routing.use import Place, Use


class Candidate(NamedTuple):
    """An instance that takes part, how it does, and what it has to do."""

    instance: Instance
    health: Health
    load: Load


class InstanceTable:
    """The instances by role: how each does, and what each has to do.

    Not thread-safe: it belongs to one event loop.

    Attributes:
        roles: of which there are instances.
        changes: how many instances have come and gone.
    """

    def __init__(
        self,
        instances: Iterable[Instance] = (),
        policy: HealthPolicy = DEFAULT_HEALTH,
        *,
        on_change: Callable[[Instance, State], None] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] | None = None,
    ) -> None:
        """Begin with all instances healthy.

        Args:
            instances: the first ones.
            policy: when one is left alone.
            on_change: told what an instance has become.
            clock: seconds of a clock that never jumps.
            jitter: returns a number from 0 to 1, by which delays between probes vary; None: a
                generator of the table's own does.
        """
        self._policy = policy
        self._on_change = on_change
        self._clock = clock
        self._jitter = jitter or random.Random().random  # noqa: S311 - no secret
        self._by_role: dict[Role, list[Candidate]] = {role: [] for role in Role}
        self._members: dict[tuple[Role, str], Candidate] = {}
        self._leaving: dict[Instance, Load] = {}
        self._removed: set[tuple[Role, str]] = set()
        self.roles: frozenset[Role] = frozenset()
        self.changes = 0
        for instance in instances:
            self.add(instance)

    @property
    def under_way(self) -> Mapping[Instance, int]:
        """Requests from here, by instance; of those that have been removed too."""
        loads = {one.instance: one.load for one in self._members.values()}
        return {
            instance: load.under_way
            for instance, load in (self._leaving | loads).items()
            if load.under_way
        }

    def load(self, instance: Instance) -> Load:
        """What an instance has to do.

        Raises:
            KeyError: it takes no part.
        """
        return self._members[instance.key].load

    def add(self, instance: Instance) -> None:
        """Let an instance take part from now on; one that does already is left as it is."""
        if instance.key in self._members:
            return
        health = self._new_health(partial(self._on_change, instance))
        load = self._leaving.pop(instance, None) or _load(instance)
        self._removed.discard(instance.key)
        self._members[instance.key] = candidate = Candidate(instance, health, load)
        self._by_role[instance.role].append(candidate)
        self.roles |= {instance.role}
        self.changes += 1

    def remove(self, instance: Instance) -> None:
        """Give an instance no further request. Those that are under way end as they would."""
        candidate = self._members.pop(instance.key, None)
        if candidate is None:
            return
        seats = self._by_role[instance.role]
        seats.remove(candidate)
        if not seats:
            self.roles -= {instance.role}
        self.changes += 1
        candidate.load.leave()
        self._leave(instance, candidate.load)
        self._removed.add(instance.key)

    def reweigh(self, old: Instance, new: Instance) -> None:
        """Have an instance that takes part weigh what `new` says, which is the same otherwise."""
        before = self._members[old.key]
        before.load.weight = new.weight
        self._members[new.key] = candidate = before._replace(instance=new)
        seats = self._by_role[new.role]
        seats[seats.index(before)] = candidate

    def judge_by(self, policy: HealthPolicy) -> None:
        """Judge all of them by another policy from now on."""
        self._policy = policy
        for one in self._members.values():
            one.health.policy = policy

    def of(self, *roles: Role) -> tuple[Instance, ...]:
        """All instances of these roles."""
        return tuple(one.instance for role in roles for one in self._by_role[role])

    def all(self, *roles: Role) -> Sequence[Candidate]:
        """The same, with how each does."""
        if len(roles) == 1:
            return self._by_role[roles[0]]
        return [one for role in roles for one in self._by_role[role]]

    def find(self, url: str, *roles: Role) -> Instance | None:
        """The instance of these roles that has this URL."""
        return next((one for one in self.of(*roles) if one.url == url), None)

    def has(self, role: Role) -> bool:
        """Whether there is an instance of this role."""
        return role in self.roles

    def state(self, instance: Instance) -> State:
        """What an instance is thought to be.

        Raises:
            KeyError: it takes no part.
        """
        return self._members[instance.key].health.state(self._clock())

    def drains(self, instance: Instance) -> bool:
        """Return whether an instance was removed or has no weight, and so may end at any time."""
        candidate = self._members.get(instance.key)
        return instance.key in self._removed if candidate is None else not candidate.load.weight

    def serves(self, *roles: Role) -> bool:
        """Whether an instance of these roles is not known to be down."""
        return any(self.state(instance) is not State.DOWN for instance in self.of(*roles))

    def met(self, *roles: Role) -> bool:
        """The same of those that have answered yet: who has just been started may not listen."""
        now_s = self._clock()
        healths = (one.health for one in self.all(*roles))
        return any(one.met and one.state(now_s) is not State.DOWN for one in healths)

    def usable(self, *roles: Role) -> Sequence[Candidate]:
        """The instances that the next request may go to; none only where there are none.

        Who cannot be reached is left out, unless none can. Of the others those are left out that
        nothing is for, unless nobody else is fit; then those that fail, unless they are more than
        half: then the fault is more likely elsewhere, and the rest would only be overrun. Last,
        those that have asked for a rest, unless all have.
        """
        pool: Sequence[Candidate] = self.all(*roles)
        if len(pool) == 1:
            return pool
        now_s = self._clock()
        if all(one.load.weight and one.health.well(now_s) for one in pool):
            return pool
        up = [one for one in pool if one.health.state(now_s) is not State.DOWN] or list(pool)
        fit = [one for one in up if one.health.fit(now_s)]
        if any(one.load.weight for one in fit):
            up, fit = ([one for one in some if one.load.weight] for some in (up, fit))
        if 2 * len(fit) < len(up):
            fit = up
        return [one for one in fit if not one.health.busy(now_s)] or fit

    def place(self, instance: Instance, promised: Place | None = None) -> Place:
        """Return a place at this instance, for a request that will only then be sent there.

        Args:
            instance: the one.
            promised: the place that the request had before, whose rank it keeps if it is at this
                instance.
        """
        load = self._health_and_load(instance)[1]
        return Place(instance, load, _promised_rank(instance, promised))

    def using(
        self, instance: Instance, *, alone: bool = True, promised: Place | None = None
    ) -> Use:
        """A request of this instance, under way while the context lasts.

        How it is left is what the instance is judged by; a cancelled request says nothing.

        Args:
            instance: the one.
            alone: whether a 500 is the instance's own. It may be due to what others have made, and
                could not be loaded.
            promised: the place that the request had before, whose rank it keeps if it is at this
                instance.
        """
        health, load = self._health_and_load(instance)
        rank = _promised_rank(instance, promised)
        return Use(instance, load, rank, health, self._clock, alone=alone)

    def _health_and_load(self, instance: Instance) -> tuple[Health, Load]:
        """How an instance does, and what it has to do, though it may take no part."""
        candidate = self._members.get(instance.key)
        if candidate is not None:
            return candidate.health, candidate.load
        # Removed since it was chosen, or named by somebody else.
        health = self._new_health(lambda _: None)
        load = self._leaving.get(instance)
        if load is None:
            self._leave(instance, load := _load(instance))
        return health, load

    def _new_health(self, on_change: Callable[[State], None]) -> Health:
        return Health(self._policy, self._clock(), on_change, self._jitter)

    def _leave(self, instance: Instance, load: Load) -> None:
        """Know of its requests for as long as there are any."""
        self._leaving = {one: its for one, its in self._leaving.items() if its.under_way}
        self._removed &= {one.key for one in self._leaving}
        self._leaving[instance] = load

    def probes_due(self) -> list[Instance]:
        """Whom to ask for their health now; each answer goes to `probed`."""
        now_s = self._clock()
        members = self._members.values()
        return [one.instance for one in members if one.health.probe_due(now_s)]

    def probed(self, instance: Instance, *, well: bool | None) -> None:
        """An instance has said that it is well, or has not; None: it could not be asked."""
        if instance.key in self._members:
            self._members[instance.key].health.probed(self._clock(), well=well)

    def reports_due(self, roles: Collection[Role], interval_s: float) -> list[Instance]:
        """Whom of these to ask now what they have to do; each answer goes to `reported`.

        Where there is one alone, nothing depends on it, but on its ranks'.

        Args:
            roles: theirs.
            interval_s: between two questions.
        """
        now_s = self._clock()
        for one in self._members.values():
            one.load.expire(now_s)
        return [
            one.instance
            for role in roles
            for one in self._by_role[role]
            if (len(self._by_role[role]) > 1 or one.load.ranks is not None)
            and one.health.state(now_s) is not State.DOWN
            and one.load.report_due(now_s, interval_s)
        ]

    def reported(self, instance: Instance, report: Report | None, interval_s: float) -> None:
        """An instance has said what it has to do; None: it has not. See `Load.reported`."""
        if instance.key in self._members:
            self._members[instance.key].load.reported(report, self._clock(), interval_s)


def _promised_rank(instance: Instance, promised: Place | None) -> int | None:
    return None if promised is None or promised.instance != instance else promised.rank


def _load(instance: Instance) -> Load:
    ranks = instance.dp_size > 1 and instance.role in CONSUMERS
    return Load(instance.url, instance.weight, Ranks(instance.dp_size) if ranks else None)
