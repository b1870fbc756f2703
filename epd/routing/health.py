"""The health of an instance: one state, from probes and from the results of requests.

The rules are those of Envoy's outlier detection and of a circuit breaker
(https://www.envoyproxy.io/docs/envoy/latest/intro/arch_overview/upstream/outlier): an instance that
keeps failing is ejected for a while, longer each time, and returns with one request on trial.

A late answer is no failure by itself: requests may queue, or need long. An instance hangs if it
makes no progress while it has requests, and others do. Progress is an answer that begins or ends
normally, or a change of the counters that it reports (`epd.routing.load.Report`).

Pure: the caller passes the time and the results of probes.
"""

import enum
import math
from collections.abc import Callable
from typing import NamedTuple

from epd.errors import Outcome

BUSY_S = 1.0
"""Time for which an overloaded instance gets no requests if it sends no `Retry-After`, in
seconds."""

FAILURES = frozenset({Outcome.BAD, Outcome.LATE, Outcome.UNREACHABLE, Outcome.REFUSED})

WINDOW = 4
"""Number of recent requests in the share of failures, in multiples of
`HealthPolicy.eject_after`."""

FAILED_SHARE = 0.7
"""Share of failures that ejects. A row of failures may never occur if clients send invalid requests
in between: their answers count as successes."""

HANG_AFTER = 3
"""Number of late answers in a row, without progress between them, that eject; 1 on trial."""

HANG_S = 30.0
"""Time without progress, while it reports running requests, that ejects, in seconds."""

MAX_EJECTION = 10
"""Upper bound of an ejection, in multiples of `HealthPolicy.eject_s`. An instance that is healthy
for this long starts again from one."""

MAX_BUSY_S = 300.0
"""Upper bound of a `Retry-After`, in seconds."""

DOWN_AFTER = 3
"""Number of failed probes in a row after which an instance is down."""

PROBE_BACKOFF_S = 1.0
"""Delay of the first probe of an instance that is down, in seconds, unless probes are more frequent
than that. Each further one doubles it."""

MAX_BACKOFF = 6
"""Upper bound of this delay, in multiples of `HealthPolicy.probe_interval_s`."""

PROBE_JITTER = 0.1
"""Share by which the delay between two probes varies in either direction. Without it, all
instances, workers and proxies that start together would probe at the same moments."""


class HealthState(enum.StrEnum):
    """The health state of an instance."""

    HEALTHY = "healthy"
    EJECTED = "ejected"
    """Reachable but failing; gets no requests for a time."""
    DOWN = "down"
    """Unreachable; gets no requests until a probe succeeds."""
    TRIAL = "trial"
    """Possibly recovered; gets one request at a time."""


class HealthPolicy(NamedTuple):
    """The settings of the same names (`epd.config.sections.limits`).

    Attributes:
        eject_after: failures in a row that eject; or `FAILED_SHARE` of the latest `WINDOW` times as
            many requests.
        eject_s: length of an ejection, times the number of the instance's recent ejections.
        probe_interval_s: interval of probes while an instance is up, and the upper bound while it
            has never answered.
    """

    eject_after: int = 5
    eject_s: float = 30.0
    probe_interval_s: float = 5.0

    @property
    def probe_backoff_s(self) -> float:
        return min(PROBE_BACKOFF_S, self.probe_interval_s)


class Health:
    """The health of one instance.

    Attributes:
        met: whether it has ever answered a probe or a request.
        proven: whether the last request that it answered or failed had succeeded.
        failing: whether that request had failed; neither before the first one.
        cause: cause of the state `EJECTED` or `DOWN`, in words; empty in other states.
        progress_s: time of its last known progress.
        late_since_s: start of the first request since then that got no answer in time; infinite
            without one.
    """

    def __init__(
        self,
        policy: HealthPolicy,
        now_s: float,
        on_change: Callable[[HealthState], None],
        random: Callable[[], float],
    ) -> None:
        """Start as healthy although not yet met, with a probe due at once.

        `now_s` is the time of a monotonic clock, as in all calls. `random` returns a number from 0
        to 1, for the jitter of probes.
        """
        self._policy = policy
        self.met = self.proven = self.failing = False
        self.cause = ""
        self.progress_s = -math.inf
        self.late_since_s = math.inf
        self._on_change = on_change
        self._random = random
        self._state = HealthState.HEALTHY
        self._since_s = self._until_s = self._busy_until_s = self._probe_s = now_s
        self._failed_probes = self._ejections = self._under_way = self._changes = self._late = 0
        self._latest = 0  # a bit for each request, 1 for a failure; the lowest is the last one
        self._window = (1 << WINDOW * policy.eject_after) - 1  # the bits that count

    def state(self, now_s: float) -> HealthState:
        if self._state is HealthState.EJECTED and now_s >= self._until_s:
            self._become(HealthState.TRIAL, now_s)
        return self._state

    def is_eligible(self, now_s: float) -> bool:
        state = self.state(now_s)
        return state is HealthState.HEALTHY or (state is HealthState.TRIAL and not self._under_way)

    def is_healthy(self, now_s: float) -> bool:
        """Return whether it is healthy and not busy: a cheap check that covers nearly all calls."""
        return self._state is HealthState.HEALTHY and now_s >= self._busy_until_s

    def is_busy(self, now_s: float) -> bool:
        """Return whether it has asked for no requests."""
        return now_s < self._busy_until_s

    def request_begun(self) -> int:
        """Count the start of a request; return a token for `request_ended`."""
        self._under_way += 1
        return self._changes

    def record_progress(self, now_s: float) -> None:
        """Record that the instance works: late answers before do not count."""
        self.progress_s = now_s
        self.late_since_s = math.inf
        self._late = 0

    def record_hang(self, now_s: float) -> None:
        """Eject an instance that makes no progress. It stays ejected while this is repeated."""
        state = self.state(now_s)
        if state in {HealthState.HEALTHY, HealthState.TRIAL}:
            self._eject(now_s, f"no progress for {HANG_S:.0f} s")
        elif state is HealthState.EJECTED:
            self._until_s = max(self._until_s, now_s + self._policy.probe_interval_s)

    def record_answer(self, now_s: float) -> None:
        """Record the start of a good answer, or a good end: a trial is passed.

        A good answer also ends an outage for the probes: earlier failed probes no longer count, and
        the back-off starts from its minimum.
        """
        self.met = self.proven = True
        self.failing = False
        state = self.state(now_s)
        if state is HealthState.TRIAL or state is HealthState.DOWN:
            self._failed_probes = 0
            self._become(HealthState.HEALTHY, now_s)

    def request_ended(
        self,
        outcome: Outcome,
        now_s: float,
        *,
        begun: int,
        rest_s: float | None = None,
        others_work: bool = False,
    ) -> None:
        """Record the end of a request.

        `begun` is the value of `request_begun`. A failure counts only if the request began after
        the last change of state: requests from before an outage may fail long after it. A late
        answer is one without progress since the request began; it ejects only if `others_work`:
        other instances made progress since `late_since_s`. An overloaded instance asks for no
        requests for `rest_s` seconds.
        """
        if begun == self._changes:
            self._under_way -= 1
        elif outcome in FAILURES:
            return
        match outcome:
            case Outcome.GOOD:
                self._latest = (self._latest << 1) & self._window
                self.record_answer(now_s)
            case Outcome.BUSY:
                rest_s = BUSY_S if rest_s is None else min(rest_s, MAX_BUSY_S)
                self._busy_until_s = now_s + rest_s
                self.record_answer(now_s)
            case Outcome.BAD | Outcome.UNREACHABLE:
                self._failed(now_s, unreachable=outcome is Outcome.UNREACHABLE)
            case Outcome.DOUBTFUL:
                self.proven, self.failing = False, True
            case Outcome.LATE:
                self._record_late(now_s, others_work=others_work)
            case Outcome.REFUSED:
                self.record_refusal(now_s)
            case Outcome.NOTHING:
                pass

    def record_refusal(self, now_s: float) -> None:
        """Record a refused connection: no process listens there, so the instance is down."""
        if self._state is not HealthState.DOWN:
            self._go_down(now_s, "connection refused")

    def record_failure(self, now_s: float, *, begun: int) -> None:
        """Record that an ended request of doubtful outcome was the instance's failure."""
        if begun == self._changes:
            self._failed(now_s, unreachable=False)

    def probe_due(self, now_s: float) -> bool:
        """Return whether a probe is due.

        After True, the caller must probe and call `record_probe`.
        """
        if now_s < self._probe_s:
            return False
        self._probe_s = math.inf
        return True

    def record_probe(self, now_s: float, *, well: bool | None) -> None:
        """Record the result of a probe; None if it could not be made."""
        try:
            if well is not None:
                self._judge_probe(now_s, well=well)
        finally:  # without a next probe, an instance that is down would stay so
            jitter = PROBE_JITTER * (2 * self._random() - 1)
            self._probe_s = now_s + self._next_probe_s() * (1 + jitter)

    def _judge_probe(self, now_s: float, *, well: bool) -> None:
        # The first answer ends a start, not an outage, unless it was ejected before.
        started = well and not self.met and not self._ejections
        self.met = self.met or well
        self._failed_probes = 0 if well else self._failed_probes + 1
        if well and self._state is HealthState.DOWN:
            self._become(HealthState.HEALTHY if started else HealthState.TRIAL, now_s)
        # An ejected instance that fails a probe too returns only after a successful probe.
        elif not well and (self._state is HealthState.EJECTED or self._failed_probes >= DOWN_AFTER):
            self._become(HealthState.DOWN, now_s, "failed health checks")

    def _next_probe_s(self) -> float:
        if self._state is not HealthState.DOWN:
            return self._policy.probe_interval_s
        doublings = min(max(0, self._failed_probes - DOWN_AFTER), 32)
        # An instance that has never answered may be starting: it is used soon after it is ready.
        most_s = self._policy.probe_interval_s * (MAX_BACKOFF if self.met else 1)
        return min(self._policy.probe_backoff_s * 2.0**doublings, most_s)

    def _record_late(self, now_s: float, *, others_work: bool) -> None:
        self._late += 1
        state = self.state(now_s)
        many = state is HealthState.HEALTHY and self._late >= HANG_AFTER
        if others_work and (many or state is HealthState.TRIAL):
            self._eject(now_s, "timeouts without progress")

    def _failed(self, now_s: float, *, unreachable: bool) -> None:
        self.proven, self.failing = False, True
        state = self.state(now_s)
        if state is HealthState.HEALTHY:
            self._latest = (self._latest << 1 | 1) & self._window
            in_row = (1 << self._policy.eject_after) - 1
            often = self._latest.bit_count() >= FAILED_SHARE * self._window.bit_count()
            if not often and self._latest & in_row != in_row:
                return
        elif state is not HealthState.TRIAL:
            return
        if unreachable:
            self._go_down(now_s, "unreachable")
        else:
            self._eject(now_s, "failed requests")

    def _go_down(self, now_s: float, cause: str) -> None:
        self._become(HealthState.DOWN, now_s, cause)
        self._probe_s = min(self._probe_s, now_s + self._policy.probe_backoff_s)

    def _eject(self, now_s: float, cause: str) -> None:
        healthy_s = now_s - self._since_s if self._state is HealthState.HEALTHY else 0.0
        if healthy_s >= MAX_EJECTION * self._policy.eject_s:
            self._ejections = 0
        self._ejections += 1
        self._until_s = now_s + self._policy.eject_s * min(self._ejections, MAX_EJECTION)
        self._become(HealthState.EJECTED, now_s, cause)
        self._probe_s = min(self._probe_s, now_s)

    def _become(self, state: HealthState, now_s: float, cause: str = "") -> None:
        if state is self._state:
            return
        self._state = state
        self.cause = cause
        self._since_s = now_s
        self._latest = self._under_way = self._late = 0
        self._changes += 1
        self._on_change(state)
