"""Requests that kill instances: counts of the deaths, and rejection of such requests. Pure.

A request that kills one engine would kill the next one too, and clients retry failed requests.
Deaths are therefore counted by what the dead instance had received: the request's body, and the
media items in it that the instance had to process. Deaths of one tenant's requests never cause the
rejection of another tenant's request.

A client that changes a character at each retry sends a new body each time. Deaths are therefore
also counted by tenant, and by the kind of the request: its endpoint, the names of its fields, its
modalities, and its size within a factor of two. From the third death on, requests of the tenant
are in quarantine: one at a time, on one instance of each stage, with one try. Kinds that are
answered far more often than instances die of them are exempt.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog
from xxhash import xxh3_128_hexdigest

from ec_store.bounded import BoundedDict
from epd.errors import (
    NoInstance,
    ProxyError,
    Stage,
    SuspectedFatal,
    UpstreamDied,
    UpstreamUnreachable,
)
from epd.routing.instances import Instance

MAX_DEATHS = 2
"""Number of deaths after which a request is rejected. A single death may be a coincidence."""

SAME_DEATH_S = 10.0
"""Time after its death in which an instance also fails unrelated requests, in seconds. No engine
restarts within that time."""

MAX_TENANT_DEATHS = 3
"""Number of deaths within `--suspect-s` after which a tenant's requests are in quarantine."""

ANSWERS_PER_DEATH = 8
"""Number of answers that outweigh one death of a kind of requests. A kind with more answers than
its deaths outweigh is exempt from the quarantine."""

MAX_CREDIT = ANSWERS_PER_DEATH * MAX_TENANT_DEATHS
"""Upper bound of the answers that count in advance: a long history must not hide a change."""

MAX_KINDS = 64
"""Upper bound of remembered kinds of each tenant."""

MAX_TENANTS = 1024
"""Upper bound of tenants with remembered kinds and deaths."""

MAX_SUSPECTS = 4096
"""Upper bound of remembered bodies and items. The oldest is forgotten first."""

logger = structlog.get_logger("epd")


def fingerprint(raw: bytes | bytearray, seed: int) -> str:
    """Return a digest that identifies a repeated body.

    `seed` is that of this process, so that no client can construct a collision.
    """
    return xxh3_128_hexdigest(raw, seed)


@dataclass(slots=True)
class Deaths:
    """Deaths of instances that served the same request or item.

    Attributes:
        count: number of deaths. All requests at an instance fail when it dies, but count as one
            death. After a restart it can die again.
        last_s: time of each instance's last death, by URL, in seconds.
    """

    count: int = 0
    last_s: dict[str, float] = field(default_factory=dict)

    def add(self, instance: Instance, now_s: float) -> None:
        """Count a death, unless it is the same one as the instance's last."""
        self.count += now_s - self.last_s.get(instance.url, -math.inf) > SAME_DEATH_S
        self.last_s[instance.url] = now_s


@dataclass(slots=True)
class Watched:
    """A client's request with its deaths.

    Attributes:
        fingerprint: digest of the body.
        deaths: deaths of instances that served it, in all stages; None for no death.
        kind: digest of what similar requests share; 0 if unknown.
        most_deaths: number of deaths after which it is sent to no further instance.
        pins: URLs of the only instances to which it may be sent, by stage; None for all.
        fatal_to: URLs of the instances that died of requests in the same quarantine, or before it.
    """

    tenant: str = ""
    fingerprint: str = ""
    deaths: Deaths | None = None
    kind: int = 0
    most_deaths: int = MAX_DEATHS
    pins: dict[Stage, str] | None = None
    fatal_to: Collection[str] = ()

    def record_death(self, instance: Instance, now_s: float) -> None:
        if self.deaths is None:
            self.deaths = Deaths()
        self.deaths.add(instance, now_s)

    @property
    def is_spent(self) -> bool:
        """Whether the request must not be sent to another instance."""
        return self.deaths is not None and self.deaths.count >= self.most_deaths

    def choose_instance(
        self,
        stage: Stage,
        best: Callable[[Callable[[Instance], bool] | None], Instance],
        fits: Callable[[Instance], bool] | None = None,
    ) -> Instance:
        """Return the instance for this request: the best one, or in a quarantine the pinned one.

        In a quarantine, the first instance that is chosen is pinned. While it is down, another
        stage may do its work, unless it died of such requests: they would end that instance too.

        Args:
            stage: the stage.
            best: returns the best instance that meets a predicate; raises `NoInstance` without one.
            fits: predicate of the instances that can serve the request; None for all.

        Raises:
            SuspectedFatal: its pinned instance may get no requests now.
            NoInstance: no instance may.
        """
        if self.pins is None:
            return best(fits)
        if (url := self.pins.get(stage)) is None:
            chosen = best(fits)
            self.pins[stage] = chosen.url
            return chosen
        try:
            return best(lambda instance: instance.url == url and (fits is None or fits(instance)))
        except NoInstance as error:
            failure = in_quarantine(stage)
            # No other stage can do decode's work.
            failure.retryable = stage != "decode" and url not in self.fatal_to
            raise failure from error

    def final_error(self, error: ProxyError, instance: Instance) -> ProxyError:
        """Return the error of a request to this instance, as if `choose_instance` had raised it.

        The only instance of a stage is chosen although it is down.
        """
        down = isinstance(error, UpstreamUnreachable)
        if self.pins is None or not down or instance.url not in self.fatal_to:
            return error
        return in_quarantine(error.stage)


class _Subject(NamedTuple):
    tenant: str
    kind: str
    digest: str


@dataclass(slots=True)
class _Suspect(Deaths):
    """The deaths of one subject. They are forgotten at `until_s`."""

    until_s: float = math.inf


@dataclass(slots=True)
class _Tenant(Deaths):
    """The deaths of one tenant.

    Attributes:
        times: times of the latest deaths.
        credit: number of answers beyond those that deaths outweigh, by kind of requests.
        pins: instances of its requests in quarantine.
    """

    times: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TENANT_DEATHS))
    credit: BoundedDict[int, int] = field(default_factory=lambda: BoundedDict(MAX_KINDS))
    pins: dict[Stage, str] = field(default_factory=dict)

    def count_death(self, instance: Instance, kind: int, now_s: float) -> None:
        before = self.count
        self.add(instance, now_s)
        if self.count > before:
            # A host that fails ends its instances within moments: that is one death of a kind.
            if not self.times or now_s - self.times[-1] > SAME_DEATH_S:
                self.credit[kind] = self.credit.get(kind, 0) - ANSWERS_PER_DEATH
            self.times.append(now_s)

    def count_answer(self, kind: int) -> None:
        credit = self.credit.get(kind, 0)
        if credit < MAX_CREDIT:
            self.credit[kind] = credit + 1

    def is_proven(self, kind: int) -> bool:
        return self.credit.get(kind, 0) > 0

    def has_died_often(self, within_s: float, now_s: float) -> bool:
        """Return whether the latest `MAX_TENANT_DEATHS` deaths came within this time."""
        return len(self.times) == MAX_TENANT_DEATHS and now_s < self.times[0] + within_s


@dataclass(frozen=True, slots=True, eq=False)
class FatalRequests:
    """Deaths by their cause, and the rejection of requests because of them.

    Belongs to one event loop. While there has been no death, a request costs a check of an empty
    mapping, and the count of its answer.

    Args:
        reject_s: returns the time of rejection after the last death; 0 to disable it.
        drains: returns whether an instance was about to leave. Its end is then not a death.
        clock: monotonic clock, in seconds.
    """

    _reject_s: Callable[[], float]
    _drains: Callable[[Instance], bool]
    _clock: Callable[[], float]
    _suspects: BoundedDict[_Subject, _Suspect] = field(
        default_factory=lambda: BoundedDict(MAX_SUSPECTS)
    )
    _tenants: BoundedDict[str, _Tenant] = field(default_factory=lambda: BoundedDict(MAX_TENANTS))

    def __len__(self) -> int:
        return len(self._suspects)

    def check(self, watched: Watched, items: Iterable[str] = ()) -> None:
        """Reject a request that has killed instances before, or one with such an item.

        Raises:
            SuspectedFatal: the request is rejected.
        """
        if not self._suspects:
            return
        for subject in _subjects(watched, items):
            if (left_s := self._rejected_s(subject)) is not None:
                raise _suspected(left_s)

    @property
    def quarantined_tenants(self) -> int:
        """Number of tenants in quarantine. The cost grows with the known tenants."""
        within_s, now_s = self._reject_s(), self._clock()
        return sum(tenant.has_died_often(within_s, now_s) for tenant in self._tenants.values())

    def is_quarantined(self, watched: Watched) -> bool:
        """Return whether a request must be in quarantine."""
        return self._quarantined(watched) is not None

    def restrict(self, watched: Watched) -> bool:
        """Restrict a request in quarantine; return False if it need not be there any more."""
        if (tenant := self._quarantined(watched)) is None:
            return False
        watched.most_deaths, watched.pins, watched.fatal_to = 1, tenant.pins, tenant.last_s
        return True

    def _quarantined(self, watched: Watched) -> _Tenant | None:
        """Return the tenant of a request that must be in quarantine; None for another one."""
        tenant = self._tenants.get(watched.tenant)
        if tenant is None or not tenant.has_died_often(self._reject_s(), self._clock()):
            return None
        return None if tenant.is_proven(watched.kind) else tenant

    def after(
        self, error: UpstreamDied, instance: Instance, watched: Watched, items: Sequence[str] = ()
    ) -> UpstreamDied | SuspectedFatal:
        """Count a death, and return the final error of the sending.

        `items` are the keys of the items that the instance had to process. They are empty if it had
        several: the cause may be any of them.
        """
        if self._drains(instance):
            return error
        now_s = self._clock()
        watched.record_death(instance, now_s)
        tenant = self._tenant(watched)
        within_s = self._reject_s()
        was_quarantined = tenant.has_died_often(within_s, now_s)
        if not was_quarantined:
            tenant.pins = {}  # an earlier quarantine may have named instances that are gone
        tenant.count_death(instance, watched.kind, now_s)
        if not was_quarantined and tenant.has_died_often(within_s, now_s):
            logger.warning(
                "tenant in quarantine: instances died while they served its requests",
                quarantine_s=round(within_s),
                next="unproven kinds of its requests are served one at a time by one instance",
            )
        if self._quarantined(watched) is not None:
            watched.most_deaths = 1
        rejected = [
            left_s
            for subject in _subjects(watched, items)
            if (left_s := self._count_death(subject, instance)) is not None
        ]
        if watched.is_spent and self._reject_s():  # its first death may have expired
            rejected.append(self._reject_s())
        if not rejected:
            return error
        logger.warning(
            "request rejected: instances died while they served it",
            stage=error.stage,
            instance=instance.url,
            rejected_s=round(max(rejected)),
            next="look for the cause of death in the logs of the instances",
        )
        return _suspected(max(rejected), error.stage)

    def final_error(
        self, error: ProxyError, instance: Instance, watched: Watched, items: Sequence[str] = ()
    ) -> ProxyError:
        """Return the final error of a request to an instance, and count its death as `after`."""
        if isinstance(error, UpstreamDied):
            return self.after(error, instance, watched, items)
        return watched.final_error(error, instance)

    def record_survival(
        self, watched: Watched, items: Iterable[str] = (), *, body: bool = True
    ) -> None:
        """Forget the deaths of processed items, and with `body`, of the processed request."""
        if self._suspects:
            for subject in _subjects(watched, items, body=body):
                self._suspects.pop(subject, None)
        if body:
            self._tenant(watched).count_answer(watched.kind)

    def _tenant(self, watched: Watched) -> _Tenant:
        tenant = self._tenants.get(watched.tenant)
        if tenant is None:
            tenant = self._tenants[watched.tenant] = _Tenant()
        return tenant

    def _count_death(self, subject: _Subject, instance: Instance) -> float | None:
        """Count a death; return the seconds of rejection of the subject, or None without one."""
        now_s = self._clock()
        suspect = self._suspects.get(subject)
        if suspect is None or now_s >= suspect.until_s:
            suspect = _Suspect()
        self._suspects[subject] = suspect
        suspect.add(instance, now_s)
        suspect.until_s = now_s + self._reject_s()
        return self._rejected_s(subject)

    def _rejected_s(self, subject: _Subject) -> float | None:
        suspect = self._suspects.get(subject)
        if suspect is None:
            return None
        left_s = suspect.until_s - self._clock()
        if left_s <= 0:
            del self._suspects[subject]
            return None
        return left_s if suspect.count >= MAX_DEATHS else None


def _subjects(watched: Watched, items: Iterable[str], *, body: bool = True) -> list[_Subject]:
    tenant = watched.tenant
    found = [_Subject(tenant, "item", xxh3_128_hexdigest(key.encode())) for key in items]
    if body and watched.fingerprint:
        found.append(_Subject(tenant, "body", watched.fingerprint))
    return found


def in_quarantine(stage: Stage) -> SuspectedFatal:
    """Return the error of a request in quarantine that no instance may serve now."""
    return SuspectedFatal(
        f"{MAX_TENANT_DEATHS} instances died while they served requests of this client: requests "
        "like them are served one at a time by one instance, which is down or has too many of them",
        stage=stage,
        retry_after_s=SAME_DEATH_S,
    )


def _suspected(left_s: float, stage: Stage = "proxy") -> SuspectedFatal:
    return SuspectedFatal(
        f"{MAX_DEATHS} instances died while they served this request, media in it, or requests "
        "like it: do not retry it",
        stage=stage,
        retry_after_s=left_s,
    )
