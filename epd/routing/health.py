"""Whether an instance is fit for requests: one state, fed by probes and by how requests ended.

The rules are Envoy's outlier detection and a circuit breaker's
(https://www.envoyproxy.io/docs/envoy/latest/intro/arch_overview/upstream/outlier): what fails again
and again is left alone for a while, longer each time, and comes back with one request on trial.
Pure: whoever calls says what time it is.
"""

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

from epd.errors import Outcome

BUSY_S = 1.0
"""How long such an instance is left alone that does not say for how long."""


class State(enum.StrEnum):
    """What an instance is thought to be."""

    HEALTHY = "healthy"
    EJECTED = "ejected"
    """It answers and fails; left alone for a time."""
    DOWN = "down"
    """It cannot be reached; left alone until a probe finds it."""
    TRIAL = "trial"
    """It may be back; one request at a time finds out."""


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """When an instance is left alone, and when it is looked at again.

    Attributes:
        eject_after: failures in a row; or `FAILED_SHARE` of the latest `WINDOW` times as many.
        eject_s: for how long, times the number of ejections since it was last healthy for long.
        max_eject_s: at most; who was healthy for so long begins anew.
        probe_interval_s: between two probes of an instance that is up, give or take
            `PROBE_JITTER`, as for the delays below.
        down_after: failed probes in a row.
        min_backoff_s: until an instance that is down is first probed again; doubled each time.
        max_backoff_s: at most.
    """

    eject_after: int = 5
    eject_s: float = 30.0
    max_eject_s: float = 300.0
    probe_interval_s: float = 5.0
    down_after: int = 3
    min_backoff_s: float = 1.0
    max_backoff_s: float = 30.0


DEFAULT_HEALTH = HealthPolicy()

WINDOW = 4
"""Requests that a share of failures is of, times `HealthPolicy.eject_after`."""

FAILED_SHARE = 0.7
"""Share of failures that ejects. A row of them may never come about where clients send requests
that are wrong in themselves: those are answered well."""

PROBE_JITTER = 0.1
"""Share by which a delay between two probes varies in either direction. Without it, all instances,
workers and proxies that start together probe at the same moments."""


class Health:
    """One instance's health.

    Attributes:
        policy: when it changes; there may be another from now on.
        met: whether it has answered yet, a probe or a request.
    """

    def __init__(
        self,
        policy: HealthPolicy,
        now_s: float,
        on_change: Callable[[State], None],
        random: Callable[[], float],
    ) -> None:
        """Begin as healthy, though nobody has met it, and to be probed at once.

        Args:
            policy: when it changes.
            now_s: a monotonic clock's time, as of all calls.
            on_change: told what it becomes.
            random: returns a number from 0 to 1, for the jitter of probes.
        """
        self.policy = policy
        self.met = False
        self._on_change = on_change
        self._random = random
        self._state = State.HEALTHY
        self._since_s = now_s
        self._until_s = now_s
        self._busy_until_s = now_s
        self._probe_s = now_s
        self._failures = 0
        self._latest = 0  # a bit for each request, 1 for a failure; the lowest is the last one
        self._failed_probes = 0
        self._ejections = 0
        self._under_way = 0
        self._changes = 0

    def state(self, now_s: float) -> State:
        """What it is thought to be."""
        if self._state is State.EJECTED and now_s >= self._until_s:
            self._become(State.TRIAL, now_s)
        return self._state

    def fit(self, now_s: float) -> bool:
        """Whether it should be given a request."""
        state = self.state(now_s)
        return state is State.HEALTHY or (state is State.TRIAL and not self._under_way)

    def well(self, now_s: float) -> bool:
        """Whether nothing speaks against it, as for nearly all nearly always."""
        return self._state is State.HEALTHY and now_s >= self._busy_until_s

    def busy(self, now_s: float) -> bool:
        """Whether it has asked to be left alone."""
        return now_s < self._busy_until_s

    def begun(self) -> int:
        """A request goes to it: what it is begun under, for `ended`."""
        self._under_way += 1
        return self._changes

    def answered(self, now_s: float) -> None:
        """An answer has begun well, or a request has ended so: a trial is passed.

        An outage that an answer ends is over for the probes too: those that failed during it do
        not count towards the next one, and the back-off begins anew.
        """
        self.met = True
        state = self.state(now_s)
        if state is State.TRIAL or state is State.DOWN:
            self._failed_probes = 0
            self._become(State.HEALTHY, now_s)

    def ended(
        self, outcome: Outcome, now_s: float, *, begun: int, rest_s: float | None = None
    ) -> None:
        """A request of it has ended.

        Args:
            outcome: how.
            now_s: when.
            begun: what `begun` said. A failure counts that began since the last change: what an
                outage has left behind fails long after it, and says nothing of now.
            rest_s: for how long it asks to be left alone, where it has too much to do.
        """
        if begun == self._changes:
            self._under_way -= 1
        elif outcome in {Outcome.BAD, Outcome.UNREACHABLE}:
            return
        match outcome:
            case Outcome.GOOD:
                self._failures = 0
                self._latest = (self._latest << 1) & self._window
                self.answered(now_s)
            case Outcome.BUSY:
                rest_s = BUSY_S if rest_s is None else min(rest_s, self.policy.max_eject_s)
                self._busy_until_s = now_s + rest_s
                self.answered(now_s)
            case Outcome.BAD | Outcome.UNREACHABLE:
                self._failed(now_s, unreachable=outcome is Outcome.UNREACHABLE)
            case Outcome.NOTHING:
                pass

    def probe_due(self, now_s: float) -> bool:
        """Whether it is time for a probe. Who is told so makes one and says what came of it."""
        if now_s < self._probe_s:
            return False
        self._probe_s = math.inf
        return True

    def probed(self, now_s: float, *, well: bool | None) -> None:
        """A probe was answered well, or not, or could not be made."""
        try:
            if well is not None:
                self._judge_probe(now_s, well=well)
        finally:  # without a next probe, an instance that is down would stay so
            jitter = PROBE_JITTER * (2 * self._random() - 1)
            self._probe_s = now_s + self._next_probe_s() * (1 + jitter)

    def _judge_probe(self, now_s: float, *, well: bool) -> None:
        self.met = self.met or well
        self._failed_probes = 0 if well else self._failed_probes + 1
        if well and self._state is State.DOWN:
            self._become(State.TRIAL, now_s)
        # Who is ejected and does not answer either, is back when a probe says so.
        elif not well and (
            self._state is State.EJECTED or self._failed_probes >= self.policy.down_after
        ):
            self._become(State.DOWN, now_s)

    def _next_probe_s(self) -> float:
        if self._state is not State.DOWN:
            return self.policy.probe_interval_s
        doublings = min(max(0, self._failed_probes - self.policy.down_after), 32)
        return min(self.policy.min_backoff_s * 2.0**doublings, self.policy.max_backoff_s)

    def _failed(self, now_s: float, *, unreachable: bool) -> None:
        self._failures += 1
        state = self.state(now_s)
        few = state is State.HEALTHY and not self._fails_often()
        if few or state in {State.EJECTED, State.DOWN}:
            return
        if unreachable:
            self._become(State.DOWN, now_s)
            self._probe_s = min(self._probe_s, now_s + self.policy.min_backoff_s)
        else:
            self._eject(now_s)

    def _fails_often(self) -> bool:
        """Count a failure; whether there are so many that the instance is left alone."""
        self._latest = (self._latest << 1 | 1) & self._window
        often = self._latest.bit_count() >= FAILED_SHARE * self._window.bit_count()
        return often or self._failures >= self.policy.eject_after

    @property
    def _window(self) -> int:
        """A bit for each of the latest requests that count."""
        return (1 << WINDOW * self.policy.eject_after) - 1

    def _eject(self, now_s: float) -> None:
        if self._state is State.HEALTHY and now_s - self._since_s >= self.policy.max_eject_s:
            self._ejections = 0
        self._ejections += 1
        rest_s = min(self.policy.eject_s * self._ejections, self.policy.max_eject_s)
        self._until_s = now_s + rest_s
        self._become(State.EJECTED, now_s)
        self._probe_s = min(self._probe_s, now_s)

    def _become(self, state: State, now_s: float) -> None:
        if state is self._state:
            return
        self._state = state
        self._since_s = now_s
        self._failures = 0
        self._latest = 0
        self._under_way = 0
        self._changes += 1
        self._on_change(state)
