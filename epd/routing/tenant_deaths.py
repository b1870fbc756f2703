"""Deaths of instances by tenant, and the quarantine of a tenant's requests. Pure.

A client that changes a character at each retry sends a new body each time. Deaths are therefore
also counted by tenant, and by the kind of the request: its endpoint, the names of its fields, its
modalities, and its size within a factor of two. From the third death on, requests of the tenant
are in quarantine: one at a time, on one instance of each stage, with one try. Kinds that are
answered far more often than instances die of them are exempt.
"""

from collections import deque
from dataclasses import dataclass, field

import structlog

from ec_store.bounded import BoundedDict
from epd.errors import Stage
from epd.routing.instances import Instance
from epd.routing.watched import MAX_TENANT_DEATHS, SAME_DEATH_S, Deaths, Watched

ANSWERS_PER_DEATH = 8
"""Number of answers that outweigh one death of a kind of requests. A kind with more answers than
its deaths outweigh is exempt from the quarantine."""

MAX_CREDIT = ANSWERS_PER_DEATH * MAX_TENANT_DEATHS
"""Upper bound of the answers that count in advance: a long history must not hide a change."""

MAX_KINDS = 64
"""Upper bound of remembered kinds of each tenant."""

MAX_TENANTS = 1024
"""Upper bound of tenants with remembered kinds and deaths."""

logger = structlog.get_logger("epd")


@dataclass(slots=True)
class WatchedTenant(Deaths):
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


class TenantDeaths:
    """Deaths and answers of the tenants' requests.

    All times are those of one monotonic clock.
    """

    def __init__(self, within_s: float) -> None:
        """Let `MAX_TENANT_DEATHS` deaths within this time put a tenant in quarantine."""
        self._within_s = within_s
        self._tenants: BoundedDict[str, WatchedTenant] = BoundedDict(MAX_TENANTS)

    def count_quarantined(self, now_s: float) -> int:
        """Return the number of tenants in quarantine. The cost grows with the known tenants."""
        return sum(
            tenant.has_died_often(self._within_s, now_s) for tenant in self._tenants.values()
        )

    def find_quarantine(self, watched: Watched, now_s: float) -> WatchedTenant | None:
        """Return the tenant of a request that must be in quarantine; None for another one."""
        tenant = self._tenants.get(watched.tenant)
        if tenant is None or not tenant.has_died_often(self._within_s, now_s):
            return None
        return tenant if tenant.credit.get(watched.kind, 0) <= 0 else None

    def count_answer(self, watched: Watched) -> None:
        credit = self._of(watched).credit
        if (answers := credit.get(watched.kind, 0)) < MAX_CREDIT:
            credit[watched.kind] = answers + 1

    def count_death(self, watched: Watched, instance: Instance, now_s: float) -> None:
        tenant = self._of(watched)
        was_quarantined = tenant.has_died_often(self._within_s, now_s)
        if not was_quarantined:
            tenant.pins = {}  # an earlier quarantine may have named instances that are gone
        if not tenant.add(instance, now_s):
            return
        # A host that fails ends its instances within moments: that is one death of a kind.
        if not tenant.times or now_s - tenant.times[-1] > SAME_DEATH_S:
            credit = tenant.credit.get(watched.kind, 0)
            tenant.credit[watched.kind] = credit - ANSWERS_PER_DEATH
        tenant.times.append(now_s)
        if not was_quarantined and tenant.has_died_often(self._within_s, now_s):
            logger.warning(
                "tenant in quarantine: instances died while they served its requests",
                quarantine_s=round(self._within_s),
                next="unproven kinds of its requests are served one at a time by one instance",
            )

    def _of(self, watched: Watched) -> WatchedTenant:
        tenant = self._tenants.get(watched.tenant)
        if tenant is None:
            tenant = self._tenants[watched.tenant] = WatchedTenant()
        return tenant
