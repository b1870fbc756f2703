"""Requests that kill instances: counts of the deaths, and rejection of such requests. Pure.

A request that kills one engine would kill the next one too, and clients retry failed requests.
Deaths are therefore counted by what the dead instance had received: the request's body, and the
media items in it that the instance had to process. Deaths of one tenant's requests never cause the
rejection of another tenant's request.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog
from xxhash import xxh3_128_hexdigest

from ec_store.bounded import BoundedDict
from epd.errors import Stage, SuspectedFatal, UpstreamDied
from epd.routing.instances import Instance

MAX_DEATHS = 2
"""Number of deaths after which a request is rejected. A single death may be a coincidence."""

SAME_DEATH_S = 10.0
"""Time after its death in which an instance also fails unrelated requests, in seconds. No engine
restarts within that time."""

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
        engine_died: whether decode's stream reported the death of its engine.
    """

    tenant: str = ""
    fingerprint: str = ""
    deaths: Deaths | None = None
    engine_died: bool = False

    def record_death(self, instance: Instance, now_s: float) -> None:
        if self.deaths is None:
            self.deaths = Deaths()
        self.deaths.add(instance, now_s)

    @property
    def is_spent(self) -> bool:
        """Whether the request must not be sent to another instance."""
        return self.deaths is not None and self.deaths.count >= MAX_DEATHS


class _Subject(NamedTuple):
    tenant: str
    kind: str
    digest: str


@dataclass(slots=True)
class _Suspect(Deaths):
    """The deaths of one subject. They are forgotten at `until_s`."""

    until_s: float = math.inf


@dataclass(frozen=True, slots=True, eq=False)
class FatalRequests:
    """Deaths by their cause, and the rejection of requests because of them.

    Belongs to one event loop. While there has been no death, a request costs one check of an empty
    mapping.

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

    def is_suspect(self, watched: Watched, item: str) -> bool:
        """Return whether an instance has died while it served an item, or the request's body."""
        return bool(self._suspects) and any(
            subject in self._suspects for subject in _subjects(watched, [item])
        )

    def after(
        self, error: UpstreamDied, instance: Instance, watched: Watched, items: Sequence[str] = ()
    ) -> UpstreamDied | SuspectedFatal:
        """Count a death, and return the final error of the sending.

        `items` are the keys of the items that the instance had to process. They are empty if it had
        several: the cause may be any of them.
        """
        if self._drains(instance):
            return error
        watched.record_death(instance, self._clock())
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

    def record_survival(
        self, watched: Watched, items: Iterable[str] = (), *, body: bool = True
    ) -> None:
        """Forget the deaths of processed items, and with `body`, of the processed request."""
        if self._suspects:
            for subject in _subjects(watched, items, body=body):
                self._suspects.pop(subject, None)

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


def _suspected(left_s: float, stage: Stage = "proxy") -> SuspectedFatal:
    return SuspectedFatal(
        f"{MAX_DEATHS} instances died while they served this request or media in it: do not retry "
        "it",
        stage=stage,
        retry_after_s=left_s,
    )
