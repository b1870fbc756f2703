"""Requests that kill instances: counts of the deaths, and rejection of such requests. Pure.

A request that kills one engine would kill the next one too, and clients retry failed requests.
Deaths are therefore counted by what the dead instance had received: the request's body, and the
media items in it that the instance had to process. Deaths of one tenant's requests never cause the
rejection of another tenant's request.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import structlog
from xxhash import xxh3_128_hexdigest

from ec_store.bounded import BoundedDict
from epd.errors import ProxyError, Stage, SuspectedFatal, UpstreamDied
from epd.routing.instances import Instance
from epd.routing.tenant_deaths import TenantDeaths
from epd.routing.watched import MAX_DEATHS, Deaths, Watched

MAX_SUSPECTS = 4096
"""Upper bound of remembered bodies and items. The oldest is forgotten first."""

logger = structlog.get_logger("epd")


def fingerprint(raw: bytes | bytearray, seed: int) -> str:
    """Return a digest that identifies a repeated body.

    `seed` is that of this process, so that no client can construct a collision.
    """
    return xxh3_128_hexdigest(raw, seed)


class _Subject(NamedTuple):
    tenant: str
    kind: str
    digest: str


@dataclass(slots=True)
class _Suspect(Deaths):
    """The deaths of one subject. They are forgotten at `until_s`."""

    until_s: float = 0.0


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
            reject_s: time of rejection after the last death, in seconds; 0 to disable it.
            drains: returns whether an instance was about to leave. Its end is then not a death.
            clock: monotonic clock, in seconds.
        """
        self._reject_s = reject_s
        self._drains = drains
        self._clock = clock
        self._suspects: BoundedDict[_Subject, _Suspect] = BoundedDict(MAX_SUSPECTS)
        self._tenants = TenantDeaths(reject_s)

    def __len__(self) -> int:
        return len(self._suspects)

    def check(self, watched: Watched, items: Iterable[str] = ()) -> None:
        """Reject a request that has killed instances before, or one with such an item.

        Raises:
            SuspectedFatal: the request is rejected.
        """
        if not self._suspects:
            return
        now_s = self._clock()
        for subject in _subjects(watched, items):
            suspect = self._find_suspect(subject, now_s)
            if suspect is not None and suspect.count >= MAX_DEATHS:
                raise _suspected(suspect.until_s - now_s)

    @property
    def quarantined_tenants(self) -> int:
        """Number of tenants in quarantine."""
        return self._tenants.count_quarantined(self._clock())

    def is_quarantined(self, watched: Watched) -> bool:
        """Return whether a request must be in quarantine."""
        return self._tenants.find_quarantine(watched, self._clock()) is not None

    def restrict(self, watched: Watched) -> bool:
        """Restrict a request in quarantine; return False if it need not be there any more."""
        if (tenant := self._tenants.find_quarantine(watched, self._clock())) is None:
            return False
        watched.most_deaths, watched.pins, watched.fatal_to = 1, tenant.pins, tenant.last_s
        return True

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
        self._tenants.count_death(watched, instance, now_s)
        if self._tenants.find_quarantine(watched, now_s) is not None:
            watched.most_deaths = 1
        if not self._reject_s:
            return error
        rejected = watched.is_spent  # its first death may have expired
        for subject in _subjects(watched, items):
            suspect = self._find_suspect(subject, now_s) or _Suspect()
            self._suspects[subject] = suspect
            suspect.add(instance, now_s)
            suspect.until_s = now_s + self._reject_s
            rejected = rejected or suspect.count >= MAX_DEATHS
        if not rejected:
            return error
        logger.warning(
            "request rejected: instances died while they served it",
            stage=error.stage,
            instance=instance.url,
            rejected_s=round(self._reject_s),
            next="look for the cause of death in the logs of the instances",
        )
        return _suspected(self._reject_s, error.stage)

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
            self._tenants.count_answer(watched)

    def _find_suspect(self, subject: _Subject, now_s: float) -> _Suspect | None:
        suspect = self._suspects.get(subject)
        if suspect is not None and suspect.until_s <= now_s:
            del self._suspects[subject]
            return None
        return suspect


def _subjects(watched: Watched, items: Iterable[str], *, body: bool = True) -> list[_Subject]:
    tenant = watched.tenant
    found = [_Subject(tenant, "item", xxh3_128_hexdigest(key.encode())) for key in items]
    if body and watched.fingerprint:
        found.append(_Subject(tenant, "body", watched.fingerprint))
    return found


def _suspected(left_s: float, stage: Stage = "proxy") -> SuspectedFatal:
    return SuspectedFatal(
        f"{MAX_DEATHS} instances died while they served this request, media in it, or requests "
        "like it: do not retry it",
        stage=stage,
        retry_after_s=left_s,
    )
