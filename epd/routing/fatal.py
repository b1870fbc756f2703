"""Requests that kill instances: counts of the deaths, rejection and quarantine. Pure.

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
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

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

MAX_SUSPECTS = 4096
"""Upper bound of remembered bodies and items. The oldest is forgotten first."""

ANSWERS_PER_DEATH = 8
"""Number of answers that outweigh one death of a kind of requests. A kind with more answers than
its deaths outweigh is exempt from the quarantine."""

MAX_CREDIT = ANSWERS_PER_DEATH * MAX_TENANT_DEATHS
"""Upper bound of the answers that count in advance: a long history must not hide a change."""

MAX_KINDS = 64
"""Upper bound of remembered kinds of each tenant."""

MAX_TENANTS = 1024
"""Upper bound of tenants with remembered kinds and deaths."""

Subject = tuple[str, str, str]
"""What instances may have died of: a tenant, `body` or `item`, and the digest of either."""

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
        latest_s: time of the last one of all.
    """

    count: int = 0
    latest_s: float = -math.inf
    last_s: dict[str, float] = field(default_factory=dict)

    def add(self, instance: Instance, now_s: float) -> bool:
        """Count a death; return False if it is the same one as the instance's last."""
        is_new = now_s - self.last_s.get(instance.url, -math.inf) > SAME_DEATH_S
        self.count += is_new
        self.last_s[instance.url] = self.latest_s = now_s
        return is_new


@dataclass(slots=True)
class Watched:
    """A client's request with its deaths.

    Attributes:
        fingerprint: digest of the body.
        kind: digest of what similar requests share; 0 if unknown.
        deaths: deaths of instances that served it, in all stages.
        most_deaths: number of deaths after which it is sent to no further instance.
        pins: URLs of the only instances to which it may be sent, by stage; None for all.
        fatal_to: URLs of the instances that died of requests in the same quarantine, or before it.
    """

    tenant: str = ""
    fingerprint: str = ""
    kind: int = 0
    deaths: Deaths = field(default_factory=Deaths)
    most_deaths: int = MAX_DEATHS
    pins: dict[Stage, str] | None = None
    fatal_to: Collection[str] = ()

    @property
    def is_spent(self) -> bool:
        return self.deaths.count >= self.most_deaths

    def choose_instance(
        self,
        stage: Stage,
        best: Callable[[Callable[[Instance], bool] | None], Instance],
    ) -> Instance:
        """Return the instance for this request: the best one, or in a quarantine the pinned one.

        In a quarantine, the first instance that is chosen is pinned. While it is down, another
        stage may do its work, unless it died of such requests: they would end that instance too.

        Args:
            stage: the stage.
            best: returns the best instance that meets a predicate, if there is one; raises
                `NoInstance` without an instance.

        Raises:
            SuspectedFatal: its pinned instance may get no requests now.
            NoInstance: no instance may.
        """
        if self.pins is None:
            return best(None)
        if (url := self.pins.get(stage)) is None:
            chosen = best(None)
            self.pins[stage] = chosen.url
            return chosen
        try:
            return best(lambda instance: instance.url == url)
        except NoInstance as error:
            failure = in_quarantine(stage)
            # No other stage can do decode's work.
            failure.retryable = stage != "decode" and url not in self.fatal_to
            raise failure from error


def in_quarantine(stage: Stage) -> SuspectedFatal:
    """Return the error of a request in quarantine that no instance may serve now."""
    return SuspectedFatal(
        f"{MAX_TENANT_DEATHS} instances died while they served requests of this client: requests "
        "like them are served one at a time by one instance, which is down or has too many of them",
        stage=stage,
        retry_after_s=SAME_DEATH_S,
    )


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

    def has_died_often(self, within_s: float, now_s: float) -> bool:
        """Return whether the latest `MAX_TENANT_DEATHS` deaths came within this time."""
        return len(self.times) == MAX_TENANT_DEATHS and now_s < self.times[0] + within_s


class FatalRequests:
    """Deaths by their cause, and the rejection of requests because of them.

    Belongs to one event loop. While there has been no death, a request costs a check of an empty
    mapping, and the count of its answer.
    """

    def __init__(
        self, reject_s: float, drains: Callable[[Instance], bool], clock: Callable[[], float]
    ) -> None:
        """Start without deaths.

        Args:
            reject_s: time of rejection after the last death, and time within which
                `MAX_TENANT_DEATHS` deaths put a tenant in quarantine, in seconds; 0 for neither.
            drains: returns whether an instance was about to leave. Its end is then not a death.
            clock: monotonic clock, in seconds.
        """
        self._reject_s = reject_s
        self._drains = drains
        self._clock = clock
        self._suspects: BoundedDict[Subject, Deaths] = BoundedDict(MAX_SUSPECTS)
        self._tenants: BoundedDict[str, _Tenant] = BoundedDict(MAX_TENANTS)

    def __len__(self) -> int:
        return len(self._suspects)

    def check(self, watched: Watched, items: Iterable[str] = ()) -> None:
        """Reject a request that has killed instances before, or one with such an item.

        Raises:
            SuspectedFatal: the request is rejected.
        """
        if self._suspects and (left_s := self._rejected_s(watched, items)) is not None:
            raise _suspected(left_s)

    def _rejected_s(self, watched: Watched, items: Iterable[str]) -> float | None:
        """Return the seconds for which a request is rejected; None if it is not."""
        now_s = self._clock()
        for subject in _subjects(watched, items):
            suspect = self._find_suspect(subject, now_s)
            if suspect is not None and suspect.count >= MAX_DEATHS:
                return suspect.latest_s + self._reject_s - now_s
        return None

    @property
    def quarantined_tenants(self) -> int:
        """Number of tenants in quarantine. The cost grows with the known tenants."""
        now_s = self._clock()
        return sum(
            tenant.has_died_often(self._reject_s, now_s) for tenant in self._tenants.values()
        )

    def is_quarantined(self, watched: Watched) -> bool:
        """Return whether a request must be in quarantine."""
        tenant = self._tenants.get(watched.tenant)
        return (
            tenant is not None
            and len(tenant.times) > 0
            and tenant.has_died_often(self._reject_s, self._clock())
            and tenant.credit.get(watched.kind, 0) <= 0
        )

    def restrict(self, watched: Watched) -> bool:
        """Restrict a request in quarantine; return False if it need not be there any more."""
        if not self.is_quarantined(watched):
            return False
        tenant = self._tenants[watched.tenant]
        watched.most_deaths, watched.pins, watched.fatal_to = 1, tenant.pins, tenant.last_s
        return True

    def count_death(
        self, error: ProxyError, instance: Instance, watched: Watched, items: Iterable[str] = ()
    ) -> ProxyError:
        """Count the death of an instance, if this error of a request to it is one.

        Return the error with which the request ends.

        `items` are the keys of the items that the instance had to process. They are empty if it had
        several: the cause may be any of them.
        """
        if isinstance(error, UpstreamUnreachable) and instance.url in watched.fatal_to:
            # The only instance of a stage is chosen although it is down.
            return in_quarantine(error.stage)
        if not isinstance(error, UpstreamDied):
            return error
        if not self._drains(instance):
            self._add_death(instance, watched, items)
        # The first death of a spent request may have been forgotten.
        is_rejected = watched.is_spent or self._rejected_s(watched, items) is not None
        if not self._reject_s or not is_rejected:
            return error
        logger.warning(
            "request rejected from now on: instances died while they served it",
            stage=error.stage,
            instance=instance.url,
            rejected_s=round(self._reject_s),
            next="look for the cause of death in the logs of the instances",
        )
        return _suspected(self._reject_s, error.stage)

    def _add_death(self, instance: Instance, watched: Watched, items: Iterable[str]) -> None:
        now_s = self._clock()
        watched.deaths.add(instance, now_s)
        self._count_tenant_death(watched, instance, now_s)
        if self.is_quarantined(watched):
            watched.most_deaths = 1
        if not self._reject_s:
            return
        for subject in _subjects(watched, items):
            suspect = self._find_suspect(subject, now_s) or Deaths()
            self._suspects[subject] = suspect
            suspect.add(instance, now_s)

    def record_survival(
        self, watched: Watched, items: Iterable[str] = (), *, body: bool = True
    ) -> None:
        """Forget the deaths of processed items, and with `body`, of the processed request."""
        if self._suspects:
            for subject in _subjects(watched, items, body=body):
                self._suspects.pop(subject, None)
        if body:
            credit = self._tenant_of(watched).credit
            if (answers := credit.get(watched.kind, 0)) < MAX_CREDIT:
                credit[watched.kind] = answers + 1

    def _count_tenant_death(self, watched: Watched, instance: Instance, now_s: float) -> None:
        tenant = self._tenant_of(watched)
        was_quarantined = tenant.has_died_often(self._reject_s, now_s)
        if not was_quarantined:
            tenant.pins = {}  # an earlier quarantine may have named instances that are gone
        if not tenant.add(instance, now_s):
            return
        # A host that fails ends its instances within moments: that is one death of a kind.
        if not tenant.times or now_s - tenant.times[-1] > SAME_DEATH_S:
            credit = tenant.credit.get(watched.kind, 0)
            tenant.credit[watched.kind] = credit - ANSWERS_PER_DEATH
        tenant.times.append(now_s)
        if not was_quarantined and tenant.has_died_often(self._reject_s, now_s):
            logger.warning(
                "tenant in quarantine: instances died while they served its requests",
                quarantine_s=round(self._reject_s),
                next="unproven kinds of its requests are served one at a time by one instance",
            )

    def _tenant_of(self, watched: Watched) -> _Tenant:
        tenant = self._tenants.get(watched.tenant)
        if tenant is None:
            tenant = self._tenants[watched.tenant] = _Tenant()
        return tenant

    def _find_suspect(self, subject: Subject, now_s: float) -> Deaths | None:
        """Return the deaths of a subject, which are forgotten some time after the last one."""
        suspect = self._suspects.get(subject)
        if suspect is not None and suspect.latest_s + self._reject_s <= now_s:
            del self._suspects[subject]
            return None
        return suspect


def _subjects(watched: Watched, items: Iterable[str], *, body: bool = True) -> list[Subject]:
    tenant = watched.tenant
    found = [(tenant, "item", xxh3_128_hexdigest(key.encode())) for key in items]
    if body and watched.fingerprint:
        found.append((tenant, "body", watched.fingerprint))
    return found


def _suspected(left_s: float, stage: Stage = "proxy") -> SuspectedFatal:
    return SuspectedFatal(
        f"{MAX_DEATHS} instances died while they served this request, media in it, or requests "
        "like it: do not retry it",
        stage=stage,
        retry_after_s=left_s,
    )
