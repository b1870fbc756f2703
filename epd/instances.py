"""The vLLM servers behind the proxy, and which of them are fit for the next request."""

import enum
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

from epd.errors import ProxyError
from epd.health import DEFAULT_HEALTH, Health, HealthPolicy, Outcome, State, asked_rest_s, judged


class Role(enum.StrEnum):
    """The stage an instance serves."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"
    PREFILL_DECODE = "prefill_decode"


@dataclass(frozen=True, slots=True)
class Instance:
    """One vLLM server.

    Attributes:
        role: the stage it serves.
        url: base URL without a trailing slash, such as `http://host:8001`.
    """

    role: Role
    url: str


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
        self._load: Counter[Instance] = Counter()
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

    def remove(self, instance: Instance) -> None:
        """Give an instance no further request. Those that are under way end as they would."""
        if self._health.pop(instance, None) is not None:
            self._by_role[instance.role].remove(instance)

    def of(self, *roles: Role) -> tuple[Instance, ...]:
        """All instances of these roles."""
        return tuple(instance for role in roles for instance in self._by_role[role])

    def state(self, instance: Instance) -> State:
        """What an instance is thought to be.

        Raises:
            KeyError: it takes no part.
        """
        return self._health[instance].state(self._clock())

    def serves(self, *roles: Role) -> bool:
        """Whether an instance of these roles is not known to be down."""
        return any(self.state(instance) is not State.DOWN for instance in self.of(*roles))

    def usable(self, role: Role) -> list[Instance]:
        """The instances that the next request may go to; none only where there are none.

        Who cannot be reached is left out, unless none can. Of the others those are left out that
        fail, unless they are more than half: then the fault is more likely elsewhere, and the rest
        would only be overrun. Last, those that have asked for a rest, unless all have.
        """
        now_s = self._clock()
        pool = [(instance, self._health[instance]) for instance in self._by_role[role]]
        up = [one for one in pool if one[1].state(now_s) is not State.DOWN] or pool
        fit = [one for one in up if one[1].fit(now_s)]
        if 2 * len(fit) < len(up):
            fit = up
        rested = [one for one in fit if not one[1].busy(now_s)]
        return [instance for instance, _ in rested or fit]

    @contextmanager
    def using(self, instance: Instance, *, alone: bool = True) -> Iterator[None]:
        """A request of this instance, under way until the context is left.

        How it is left is what the instance is judged by; a cancelled request says nothing.

        Args:
            instance: the one.
            alone: whether a 500 is the instance's own. It may be due to what others have made, and
                could not be loaded.
        """
        health = self._health.get(instance)
        if health is None:  # removed since it was chosen
            health = Health(self._policy, self._clock(), lambda _: None)
        begun = health.begun()
        self._load[instance] += 1
        outcome, error = Outcome.NOTHING, None
        try:
            yield
            outcome = Outcome.GOOD
        except ProxyError as failure:
            excused = not alone and failure.answered == HTTPStatus.INTERNAL_SERVER_ERROR
            outcome, error = Outcome.NOTHING if excused else judged(failure), failure
            raise
        finally:
            self._load[instance] -= 1
            if not self._load[instance]:
                del self._load[instance]
            health.ended(outcome, self._clock(), begun=begun, rest_s=asked_rest_s(error))

    def answered(self, instance: Instance) -> None:
        """An instance has begun to answer well; its answer may yet take long."""
        if instance in self._health:
            self._health[instance].answered(self._clock())

    def probes_due(self) -> list[Instance]:
        """Whom to ask for their health now; each answer goes to `probed`."""
        now_s = self._clock()
        return [instance for instance, health in self._health.items() if health.probe_due(now_s)]

    def probed(self, instance: Instance, *, well: bool | None) -> None:
        """An instance has said that it is well, or has not; None: it could not be asked."""
        if instance in self._health:
            self._health[instance].probed(self._clock(), well=well)
