"""Requests that instances die of: how many deaths each has caused, and when it is rejected. Pure.

A request that ends an engine would end the next one too, and clients repeat what failed. So deaths
are counted by what the instances had been sent: the request's body, and the media items in it that
the dead instance had to process. Entries of one tenant never reject another tenant's requests.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog
from xxhash import xxh3_128_hexdigest

from epd.errors import Stage, SuspectedFatal, UpstreamDied
from epd.routing.instances import Instance

MAX_DEATHS = 2
"""How many instances may die of a request. One death can be a coincidence."""

SAME_DEATH_S = 10.0
"""How long after its death an instance still fails requests that had nothing to do with it. No
engine is up again within that time."""

MAX_SUSPECTS = 4096
"""How many bodies and items are remembered; the oldest is forgotten first."""

DIGESTED_BYTES = 128 * 1024
"""How much of a large body is digested at its beginning, at its end, and in samples between."""

logger = structlog.get_logger("epd")


def fingerprint(raw: bytes | bytearray, seed: int) -> str:
    """Return a digest by which a body is known when it comes again.

    Bodies with media are digested in part, since their items are known by keys of their own.

    Args:
        raw: the body as it came.
        seed: of this process, so that no client can make two bodies look the same.
    """
    if len(raw) <= 2 * DIGESTED_BYTES:
        return xxh3_128_hexdigest(raw, seed)
    between = raw[:: len(raw) // DIGESTED_BYTES]
    some = bytes(raw[:DIGESTED_BYTES]) + bytes(between) + bytes(raw[-DIGESTED_BYTES:])
    return f"{len(raw):x}-{xxh3_128_hexdigest(some, seed)}"


@dataclass(slots=True)
class Deaths:
    """Deaths of instances while they served the same.

    Attributes:
        count: how many there were. All requests that an instance had fail in the moment of its
            death. It can die again once it is up again.
        last_s: when each instance died last, by URL, in seconds.
    """

    count: int = 0
    last_s: dict[str, float] = field(default_factory=dict)

    def add(self, instance: Instance, now_s: float) -> None:
        """Count a death, if it is not the instance's last one."""
        self.count += now_s - self.last_s.get(instance.url, -math.inf) > SAME_DEATH_S
        self.last_s[instance.url] = now_s


@dataclass(slots=True)
class Watched:
    """A client's request whose sendings are watched for deaths.

    Attributes:
        tenant: name of its tenant.
        fingerprint: of its body.
        deaths: of instances that served it, over all stages; None: there were none.
        engine_died: whether decode's stream said that its engine died.
    """

    tenant: str = ""
    fingerprint: str = ""
    deaths: Deaths | None = None
    engine_died: bool = False

    def died(self, instance: Instance, now_s: float) -> None:
        """Count a death."""
        if self.deaths is None:
            self.deaths = Deaths()
        self.deaths.add(instance, now_s)

    @property
    def spent(self) -> bool:
        """Whether it must be sent to no further instance."""
        return self.deaths is not None and self.deaths.count >= MAX_DEATHS


class _Subject(NamedTuple):
    tenant: str
    kind: str
    digest: str


@dataclass(slots=True)
class _Suspect:
    """What instances have died of.

    Attributes:
        deaths: of instances.
        until_s: when they are forgotten.
    """

    deaths: Deaths = field(default_factory=Deaths)
    until_s: float = math.inf


class FatalRequests:
    """Deaths by what caused them, and requests that are rejected because of them.

    Belongs to one event loop. While nothing has died, a request costs one look at an empty mapping.
    """

    def __init__(
        self,
        reject_s: Callable[[], float],
        drains: Callable[[Instance], bool],
        clock: Callable[[], float],
    ) -> None:
        """Begin with no suspect.

        Args:
            reject_s: how long a request is rejected after its last death; 0: not at all.
            drains: whether an instance was about to leave, so that its end is no death.
            clock: seconds of a clock that never jumps.
        """
        self._reject_s = reject_s
        self._drains = drains
        self._clock = clock
        self._suspects: OrderedDict[_Subject, _Suspect] = OrderedDict()

    def __len__(self) -> int:
        """Return how many bodies and items are remembered."""
        return len(self._suspects)

    def check(self, watched: Watched, items: Iterable[str] = ()) -> None:
        """Reject a request that has ended instances before, or one with an item that has.

        Args:
            watched: the request.
            items: keys of its items.

        Raises:
            SuspectedFatal: it has.
        """
        if not self._suspects:
            return
        for subject in _subjects(watched, items):
            if (left_s := self._rejected_s(subject)) is not None:
                raise _suspected(left_s)

    def after(
        self, error: UpstreamDied, instance: Instance, watched: Watched, items: Sequence[str] = ()
    ) -> UpstreamDied | SuspectedFatal:
        """Count a death, and return the error that the sending ends in.

        Args:
            error: what the sending ended in.
            instance: the one that died.
            watched: the request that it had.
            items: keys of the items that it had to process.
        """
        if self._drains(instance):
            return error
        watched.died(instance, self._clock())
        rejected = [
            left_s
            for subject in _subjects(watched, items)
            if (left_s := self._died(subject, instance)) is not None
        ]
        if watched.spent and self._reject_s():  # its first death may be forgotten by now
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

    def survived(self, watched: Watched, items: Iterable[str] = (), *, body: bool = True) -> None:
        """Forget the deaths of what an instance has processed without harm.

        Args:
            watched: the request.
            items: keys of the items that were processed.
            body: whether all of the request was.
        """
        if self._suspects:
            for subject in _subjects(watched, items, body=body):
                self._suspects.pop(subject, None)

    def _died(self, subject: _Subject, instance: Instance) -> float | None:
        """Count a death; return for how many seconds the subject is rejected, None if it is not."""
        now_s = self._clock()
        suspect = self._suspects.get(subject)
        if suspect is None or now_s >= suspect.until_s:
            suspect = self._suspects[subject] = _Suspect()
        suspect.deaths.add(instance, now_s)
        suspect.until_s = now_s + self._reject_s()
        self._suspects.move_to_end(subject)
        while len(self._suspects) > MAX_SUSPECTS:
            self._suspects.popitem(last=False)
        return self._rejected_s(subject)

    def _rejected_s(self, subject: _Subject) -> float | None:
        suspect = self._suspects.get(subject)
        if suspect is None:
            return None
        left_s = suspect.until_s - self._clock()
        if left_s <= 0:
            del self._suspects[subject]
            return None
        return left_s if suspect.deaths.count >= MAX_DEATHS else None


def _subjects(watched: Watched, items: Iterable[str], *, body: bool = True) -> list[_Subject]:
    tenant = watched.tenant
    found = [_Subject(tenant, "item", xxh3_128_hexdigest(key.encode())) for key in items]
    if body and watched.fingerprint:
        found.append(_Subject(tenant, "body", watched.fingerprint))
    return found


def _suspected(left_s: float, stage: Stage = "proxy") -> SuspectedFatal:
    return SuspectedFatal(
        f"{MAX_DEATHS} instances died while they served this request or media in it: do not repeat "
        "it",
        stage=stage,
        retry_after_s=left_s,
    )
