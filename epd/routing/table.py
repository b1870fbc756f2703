"""The instance table: the health and the load of each instance, and which ones are usable.

A request at an instance counts as load while it is in progress (`Reservation`). Its end is a
judgement of the instance's health (`InFlight`).
"""

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self

from epd.errors import Outcome, ProxyError
from epd.routing.health import HANG_S, Health, HealthPolicy, HealthState
from epd.routing.instances import CONSUMERS, Instance, Role
from epd.routing.load import Load
from epd.routing.prefix import NO_PREFIX, Prefix
from epd.routing.reports import Report


@dataclass(slots=True, eq=False)
class Reservation:
    """A request's place at an instance, which counts as load until the context exits.

    Attributes:
        rank: data-parallel rank of the request; None to let the instance choose.
    """

    instance: Instance
    rank: int | None
    _load: Load

    def begin_request(self) -> Self:
        self._load.begin_request(self.rank)
        return self

    def end_request(self, error: BaseException | None = None) -> None:  # noqa: ARG002 - of `InFlight`
        self._load.end_request(self.rank)

    def __enter__(self) -> Self:
        return self.begin_request()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end_request(error)


class Work(NamedTuple):
    """Predicted work of a request.

    Attributes:
        prompt_tokens: tokens of its prompt that the instance prefills, if not known by a `Prefix`.
        encode_tokens: tokens of its media items that the instance encodes.
    """

    prompt_tokens: int = 0
    encode_tokens: int = 0


NO_WORK = Work()


@dataclass(slots=True, eq=False)
class InFlight(Reservation):
    """Request at an instance.

    Each `begin_request` needs one `end_request`; or use it as a context manager.

    Attributes:
        matched: estimated number of the prompt's tokens that were in the prefix cache; None without
            a prefix.
        was_proven: whether the last judged request at the instance, before this one ended, had
            succeeded.
        began_failing: whether the one before this one began had failed.
    """

    _health: Health
    _clock: Callable[[], float]
    _others_work: Callable[[Instance, float], bool]
    _prefix: Prefix
    _work: Work
    _begun: int = 0
    _begun_s: float = 0.0
    _answered: bool = False
    _computed: int = 0
    matched: int | None = None
    was_proven: bool = False
    began_failing: bool = False

    def begin_request(self) -> Self:
        self._load.begin_request(self.rank)
        self._begun = self._health.request_begun()
        self._begun_s = self._clock()
        self.began_failing = self._health.failing
        if self._prefix.links:
            self._computed = self._load.cache_of(self.rank).begin_prompt(self._prefix)
            self.matched = self._prefix.tokens - self._computed
        elif self._work.prompt_tokens:
            self._computed = self._work.prompt_tokens
            self._load.cache_of(self.rank).pending += self._computed
        self._load.encode.tokens += self._work.encode_tokens
        return self

    def record_answer(self) -> None:
        """Record the start of a good answer, which may still take long."""
        now_s = self._clock()
        self._health.record_progress(now_s)
        self._health.record_answer(now_s)
        if not self._answered:
            self._answered = True
            self._load.answering += 1
        self._end_work()

    def _end_work(self, error: BaseException | None = None) -> None:
        if self._computed:
            self._load.cache_of(self.rank).pending -= self._computed
            self._computed = 0
        if tokens := self._work.encode_tokens:
            self._work, load = NO_WORK, self._load
            load.encode.tokens -= tokens
            if error is None and self.instance.role is Role.ENCODE:
                load.encode.learn_answer(tokens, self._begun_s, load.under_way / load.value)

    def end_request(self, error: BaseException | None = None) -> None:
        """Judge the instance by the request's end. A cancelled request does not count.

        A 500 counts only if the request succeeds elsewhere (`blame_instance`).
        """
        self._end_work(error)
        self._load.end_request(self.rank)
        self._load.answering -= self._answered
        self.was_proven = self._health.proven
        self._answered = False
        now_s, outcome, rest_s = self._clock(), Outcome.NOTHING, None
        if error is None:
            outcome = Outcome.GOOD
            self._health.record_progress(now_s)
        elif isinstance(error, ProxyError):
            outcome = Outcome.DOUBTFUL if error.engine_failed else error.outcome
            rest_s = error.rest_s
        others_work = False
        if outcome is Outcome.LATE:
            if self._made_progress():
                outcome = Outcome.NOTHING
            else:
                since_s = self._health.late_since_s = min(self._health.late_since_s, self._begun_s)
                others_work = self._others_work(self.instance, since_s)
        self._health.request_ended(
            outcome, now_s, begun=self._begun, rest_s=rest_s, others_work=others_work
        )

    def _made_progress(self) -> bool:
        """Return whether the instance worked since the request began, or may have.

        Without reported counters, its open answers may be progress.
        """
        report = self._load.report
        may_have = self._load.answering > 0 and (report is None or report.progress is None)
        return may_have or self._health.progress_s > self._begun_s

    def blame_instance(self) -> None:
        self._health.record_failure(self._clock(), begun=self._begun)


class Candidate(NamedTuple):
    """An instance of the table, with its health and its load."""

    instance: Instance
    health: Health
    load: Load


class InstanceTable:
    """The instances by role, with their health and their load.

    Belongs to one event loop; not thread-safe.

    Attributes:
        roles: roles with at least one instance.
        changes: number of instances added and removed.
    """

    def __init__(
        self,
        instances: Iterable[Instance] = (),
        policy: HealthPolicy = HealthPolicy(),  # noqa: B008 - immutable
        *,
        on_change: Callable[[Instance, HealthState, str], None] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the table with all instances healthy.

        `on_change` gets the new state of an instance, and the cause of `EJECTED` and `DOWN`.
        `clock` is monotonic, in seconds.
        """
        self._policy = policy
        self._on_change = on_change
        self._clock = clock
        # A generator of its own: other code in the process may seed the module's one.
        self._jitter = random.Random().random  # noqa: S311 - no secret
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
        """Number of this proxy's requests, by instance, including removed ones."""
        loads = {member.instance: member.load for member in self._members.values()}
        everywhere = (self._leaving | loads).items()
        return {instance: load.under_way for instance, load in everywhere if load.under_way}

    def load(self, instance: Instance) -> Load:
        """Return the load of an instance; raise KeyError if it is not in the table."""
        return self._members[instance.key].load

    def find_load(self, instance: Instance) -> Load | None:
        candidate = self._members.get(instance.key)
        return None if candidate is None else candidate.load

    def add(self, instance: Instance) -> None:
        """Add an instance. One that is in the table already remains unchanged."""
        if instance.key in self._members:
            return
        health = self._new_health(partial(self._health_changed, instance))
        load = self._leaving.pop(instance, None) or _load(instance, self._clock)
        self._removed.discard(instance.key)
        self._members[instance.key] = candidate = Candidate(instance, health, load)
        self._by_role[instance.role].append(candidate)
        self.roles |= {instance.role}
        self.changes += 1

    def remove(self, instance: Instance) -> None:
        """Remove an instance: it gets no new requests. Requests in progress continue."""
        candidate = self._members.pop(instance.key)
        candidates = self._by_role[instance.role]
        candidates.remove(candidate)
        if not candidates:
            self.roles -= {instance.role}
        self.changes += 1
        candidate.load.leave()
        self._keep_leaving(instance, candidate.load)
        self._removed.add(instance.key)

    def set_weight(self, old: Instance, new: Instance) -> None:
        """Give an instance of the table the weight of `new`, which is equal in all else."""
        before = self._members[old.key]
        before.load.set_weight(new.weight)
        self._members[new.key] = candidate = before._replace(instance=new)
        candidates = self._by_role[new.role]
        candidates[candidates.index(before)] = candidate

    def of_roles(self, *roles: Role) -> tuple[Instance, ...]:
        return tuple(candidate.instance for candidate in self.all(*roles))

    def all(self, *roles: Role) -> Sequence[Candidate]:
        if len(roles) == 1:
            return self._by_role[roles[0]]
        return [candidate for role in roles for candidate in self._by_role[role]]

    def find_instance(self, url: str, *roles: Role) -> Instance | None:
        return next((instance for instance in self.of_roles(*roles) if instance.url == url), None)

    def has(self, role: Role) -> bool:
        return role in self.roles

    def state(self, instance: Instance) -> HealthState:
        """Return the health state of an instance; raise KeyError if it is not in the table."""
        return self._members[instance.key].health.state(self._clock())

    def cause(self, instance: Instance) -> str:
        """Return the cause of the state `EJECTED` or `DOWN`; empty in other states."""
        return self._members[instance.key].health.cause

    def is_draining(self, instance: Instance) -> bool:
        """Return whether an instance was removed or has weight 0, and so may stop at any time."""
        candidate = self._members.get(instance.key)
        return instance.key in self._removed if candidate is None else not candidate.load.weight

    def any_serving(self, *roles: Role) -> bool:
        return any(
            self.state(instance) is not HealthState.DOWN for instance in self.of_roles(*roles)
        )

    def serves_answered(self, *roles: Role) -> bool:
        """Return whether any instance of these roles that has answered once is not down.

        A new instance may not listen yet.
        """
        now_s = self._clock()
        healths = (candidate.health for candidate in self.all(*roles))
        return any(health.met and health.state(now_s) is not HealthState.DOWN for health in healths)

    def usable_candidates(self, *roles: Role) -> Sequence[Candidate]:
        """Return the instances that may get the next request; empty only if there are none.

        Exclude instances that are down. Exclude drained ones, if another one is fit. Exclude
        failing ones, unless they are more than half: then the cause is probably elsewhere, and the
        rest would be overloaded. Exclude those that sent a `Retry-After`. A rule that would exclude
        all instances is skipped.
        """
        pool: Sequence[Candidate] = self.all(*roles)
        if len(pool) == 1:
            return pool
        now_s = self._clock()
        if all(candidate.load.weight and candidate.health.is_healthy(now_s) for candidate in pool):
            return pool
        up = [
            candidate for candidate in pool if candidate.health.state(now_s) is not HealthState.DOWN
        ] or list(pool)
        fit = [candidate for candidate in up if candidate.health.is_eligible(now_s)]
        if any(candidate.load.weight for candidate in fit):
            up, fit = (
                [candidate for candidate in some if candidate.load.weight] for some in (up, fit)
            )
        if 2 * len(fit) < len(up):
            fit = up
        return [candidate for candidate in fit if not candidate.health.is_busy(now_s)] or fit

    def reserve_place(
        self, instance: Instance, rank: int | None = None, *, prefix: Prefix = NO_PREFIX
    ) -> Reservation:
        """Return a place at this instance, for a request that will be sent to it later.

        Without a data-parallel rank, the rank is chosen by the prompt.
        """
        load = self._health_and_load(instance)[1]
        rank = load.next_rank(prefix) if rank is None else rank
        return Reservation(instance, rank, load)

    def track_request(
        self,
        instance: Instance,
        *,
        rank: int | None = None,
        prefix: Prefix = NO_PREFIX,
        work: Work = NO_WORK,
    ) -> InFlight:
        """Return a context manager for a request at this instance.

        Its exit judges the instance by the error. A cancelled request does not count. Once sent,
        the prompt counts as content of the prefix cache. Without a rank, the rank is chosen by the
        prompt.
        """
        health, load = self._health_and_load(instance)
        rank = load.next_rank(prefix) if rank is None else rank
        return InFlight(instance, rank, load, health, self._clock, self._others_work, prefix, work)

    def _others_work(self, instance: Instance, since_s: float) -> bool:
        return any(
            other.health.progress_s > since_s
            for other in self._by_role[instance.role]
            if other.instance != instance
        )

    def _health_and_load(self, instance: Instance) -> tuple[Health, Load]:
        candidate = self._members.get(instance.key)
        if candidate is not None:
            return candidate.health, candidate.load
        # Removed after it was chosen, or named by a client.
        health = self._new_health(lambda _: None)
        load = self._leaving.get(instance)
        if load is None:
            self._keep_leaving(instance, load := _load(instance, self._clock))
        return health, load

    def _health_changed(self, instance: Instance, state: HealthState) -> None:
        """Report a change. An instance that is down has lost its prefix cache, or may have."""
        member = self._members.get(instance.key)
        if state is HealthState.DOWN and member is not None:
            member.load.forget_engines()
        self._on_change(instance, state, "" if member is None else member.health.cause)

    def _new_health(self, on_change: Callable[[HealthState], None]) -> Health:
        return Health(self._policy, self._clock(), on_change, self._jitter)

    def _keep_leaving(self, instance: Instance, load: Load) -> None:
        self._leaving = {old: left for old, left in self._leaving.items() if left.under_way}
        self._removed &= {old.key for old in self._leaving}
        self._leaving[instance] = load

    def probes_due(self) -> list[Instance]:
        now_s = self._clock()
        members = self._members.values()
        return [member.instance for member in members if member.health.probe_due(now_s)]

    def record_refusal(self, instance: Instance) -> None:
        """Record that an instance refused a connection outside its requests and probes.

        An instance that has never answered may be starting. It stays as its probes left it, so that
        it gets requests as soon as it is ready.
        """
        member = self._members.get(instance.key)
        if member is not None and member.health.met:
            member.health.record_refusal(self._clock())

    def record_probe(self, instance: Instance, *, well: bool | None) -> None:
        """Record the result of a probe; None if it could not be made."""
        if instance.key in self._members:
            self._members[instance.key].health.record_probe(self._clock(), well=well)

    def reports_due(self, interval_s: float) -> list[Instance]:
        """Return the instances to ask for their load now; each answer goes to `record_report`."""
        now_s = self._clock()
        for member in self._members.values():
            member.load.expire_report(now_s)
        return [
            member.instance
            for member in self._members.values()
            if member.health.state(now_s) is not HealthState.DOWN
            and member.load.report_due(now_s, interval_s)
        ]

    def record_report(self, instance: Instance, report: Report | None, interval_s: float) -> None:
        """Record the report of an instance; None after a failure. See `Load.record_report`.

        Encode instances report no progress: the time of an encode is bounded.
        """
        member = self._members.get(instance.key)
        if member is None:
            return
        now_s, health, load = self._clock(), member.health, member.load
        load.record_report(report, now_s, interval_s)
        if instance.role is Role.ENCODE or report is None or not report.progress:
            return
        if load.progress_s == now_s:
            health.record_progress(now_s)
        elif now_s - load.stalled_s >= HANG_S and self._others_work(instance, load.stalled_s):
            health.record_hang(now_s)


def _load(instance: Instance, clock: Callable[[], float]) -> Load:
    several = instance.dp_size > 1 and instance.role in CONSUMERS
    return Load(instance.url, instance.weight, instance.dp_size if several else 0, clock)
