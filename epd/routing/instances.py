"""The vLLM servers behind the proxy, and which of them are fit for the next request."""

import enum
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from types import TracebackType
from typing import Self

from epd.errors import ProxyError
from epd.routing.health import (
    DEFAULT_HEALTH,
    Health,
    HealthPolicy,
    Outcome,
    State,
    asked_rest_s,
    judged,
)
from epd.routing.ranks import Ranks


class Role(enum.StrEnum):
    """The stage an instance serves."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"
    PREFILL_DECODE = "prefill_decode"


ANSWERING = (Role.DECODE, Role.PREFILL_DECODE)
"""The roles of the instances that answer, of which there is one at a time."""

CONSUMERS = frozenset({Role.PREFILL, Role.PREFILL_DECODE})
"""The roles of the instances that encoder outputs go to."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One vLLM server.

    Attributes:
        role: the stage it serves.
        url: base URL without a trailing slash, such as `http://host:8001`.
        dp_size: data-parallel ranks behind it, of which a request to a consumer names one.
        weight: how much of the load is for it, beside others of its role.
        kv_addr: where its KV connector is spoken to, as the KV transfer in use writes it; empty:
            nowhere, or where the transfer knows.
        ec_zmq_addrs: where encode instances push encoder outputs to, for each data-parallel rank.
    """

    role: Role
    url: str
    dp_size: int = 1
    weight: float = 1.0
    kv_addr: str = ""
    ec_zmq_addrs: tuple[str, ...] = ()

    def __hash__(self) -> int:
        """The URL's, which Python remembers: tables of instances are looked into all the time."""
        return hash(self.url)


class InstanceTable:
    """The instances by role: how each does, and what each has to do.

    Not thread-safe: it belongs to one event loop.
    """

    def __init__(
        self,
        instances: Iterable[Instance] = (),
        policy: HealthPolicy = DEFAULT_HEALTH,
        *,
        on_change: Callable[[Instance, State], None] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with all instances healthy.

        Args:
            instances: the first ones.
            policy: when one is left alone.
            on_change: told what an instance has become.
            clock: seconds of a clock that never jumps.
        """
        self._policy = policy
        self._on_change = on_change
        self._clock = clock
        self._by_role: dict[Role, list[Instance]] = {role: [] for role in Role}
        self._health: dict[Instance, Health] = {}
        self._load: dict[Instance, int] = {}
        self._ranks: dict[Instance, Ranks] = {}
        for instance in instances:
            self.add(instance)

    @property
    def load(self) -> Mapping[Instance, int]:
        """Requests under way, by instance; those that have none may be missing."""
        return self._load

    def add(self, instance: Instance) -> None:
        """Let an instance take part from now on; one that does already is left as it is."""
        if instance in self._health:
            return
        self._by_role[instance.role].append(instance)
        self._health[instance] = Health(
            self._policy, self._clock(), partial(self._on_change, instance)
        )
        if instance.dp_size > 1 and instance.role in CONSUMERS:
            self._ranks[instance] = Ranks(instance.dp_size)

    def remove(self, instance: Instance) -> None:
        """Give an instance no further request. Those that are under way end as they would."""
        if self._health.pop(instance, None) is not None:
            self._by_role[instance.role].remove(instance)
            self._ranks.pop(instance, None)

    def judge_by(self, policy: HealthPolicy) -> None:
        """Judge all of them by another policy from now on."""
        self._policy = policy
        for health in self._health.values():
            health.policy = policy

    def of(self, *roles: Role) -> tuple[Instance, ...]:
        """All instances of these roles."""
        return tuple(instance for role in roles for instance in self._by_role[role])

    def find(self, url: str, *roles: Role) -> Instance | None:
        """The instance of these roles that has this URL."""
        return next((one for one in self.of(*roles) if one.url == url), None)

    def has(self, role: Role) -> bool:
        """Whether there is an instance of this role."""
        return bool(self._by_role[role])

    def state(self, instance: Instance) -> State:
        """What an instance is thought to be.

        Raises:
            KeyError: it takes no part.
        """
        return self._health[instance].state(self._clock())

    def serves(self, *roles: Role) -> bool:
        """Whether an instance of these roles is not known to be down."""
        return any(self.state(instance) is not State.DOWN for instance in self.of(*roles))

    def usable(self, *roles: Role) -> list[Instance]:
        """The instances that the next request may go to; none only where there are none.

        Who cannot be reached is left out, unless none can. Of the others those are left out that
        fail, unless they are more than half: then the fault is more likely elsewhere, and the rest
        would only be overrun. Last, those that have asked for a rest, unless all have.
        """
        instances = self.of(*roles)
        if len(instances) == 1:
            return list(instances)
        now_s = self._clock()
        pool = [(instance, self._health[instance]) for instance in instances]
        if all(health.well(now_s) for _, health in pool):
            return list(instances)
        up = [one for one in pool if one[1].state(now_s) is not State.DOWN] or pool
        fit = [one for one in up if one[1].fit(now_s)]
        if 2 * len(fit) < len(up):
            fit = up
        rested = [one for one in fit if not one[1].busy(now_s)]
        return [instance for instance, _ in rested or fit]

    def place(self, instance: Instance) -> "Place":
        """A place at this instance, for a request that will only then be sent there."""
        return Place(instance, self._load, self._ranks.get(instance))

    def using(
        self, instance: Instance, *, alone: bool = True, promised: "Place | None" = None
    ) -> "Use":
        """A request of this instance, under way while the context lasts.

        How it is left is what the instance is judged by; a cancelled request says nothing.

        Args:
            instance: the one.
            alone: whether a 500 is the instance's own. It may be due to what others have made, and
                could not be loaded.
            promised: the place that the request had before, whose rank it keeps if it is at this
                instance.
        """
        health = self._health.get(instance)
        load = self._load
        if health is None:  # removed since it was chosen, or named by somebody else
            health, load = Health(self._policy, self._clock(), lambda _: None), {}
        kept = None if promised is None or promised.instance != instance else promised.rank
        place = Place(instance, load, self._ranks.get(instance), kept)
        return Use(place, health, self._clock, alone=alone)

    def probes_due(self) -> list[Instance]:
        """Whom to ask for their health now; each answer goes to `probed`."""
        now_s = self._clock()
        return [instance for instance, health in self._health.items() if health.probe_due(now_s)]

    def probed(self, instance: Instance, *, well: bool | None) -> None:
        """An instance has said that it is well, or has not; None: it could not be asked."""
        if instance in self._health:
            self._health[instance].probed(self._clock(), well=well)


class Place:
    """A request's place at an instance, which counts as load while the context lasts.

    Attributes:
        instance: the one.
        rank: the data-parallel rank that it is for; None: the instance sees to it.
    """

    __slots__ = ("_load", "_ranks", "instance", "rank")

    def __init__(
        self,
        instance: Instance,
        load: dict[Instance, int],
        ranks: Ranks | None,
        rank: int | None = None,
    ) -> None:
        self.instance = instance
        self._load = load
        self._ranks = ranks
        self.rank = ranks.next() if ranks is not None and rank is None else rank

    def __enter__(self) -> Self:
        """It is taken."""
        self._load[self.instance] = self._load.get(self.instance, 0) + 1
        if self._ranks is not None and self.rank is not None:
            self._ranks.begin(self.rank)
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """It is free again."""
        left = self._load.pop(self.instance) - 1
        if left:
            self._load[self.instance] = left
        if self._ranks is not None and self.rank is not None:
            self._ranks.end(self.rank)


class Use:
    """One request of an instance."""

    __slots__ = ("_alone", "_begun", "_clock", "_health", "_place")

    def __init__(
        self, place: Place, health: Health, clock: Callable[[], float], *, alone: bool
    ) -> None:
        self._place = place
        self._health = health
        self._clock = clock
        self._alone = alone

    @property
    def rank(self) -> int | None:
        """The data-parallel rank that it is for; None: the instance sees to it."""
        return self._place.rank

    def __enter__(self) -> Self:
        """It goes to the instance."""
        self._place.__enter__()
        self._begun = self._health.begun()
        return self

    def answered(self) -> None:
        """The instance has begun to answer well; its answer may yet take long."""
        self._health.answered(self._clock())

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """It has ended, and how."""
        self._place.__exit__(kind, error, trace)
        self._health.ended(
            self._outcome(error), self._clock(), begun=self._begun, rest_s=asked_rest_s(error)
        )

    def _outcome(self, error: BaseException | None) -> Outcome:
        if error is None:
            return Outcome.GOOD
        if not isinstance(error, ProxyError):
            return Outcome.NOTHING
        excused = not self._alone and error.answered == HTTPStatus.INTERNAL_SERVER_ERROR
        return Outcome.NOTHING if excused else judged(error)
