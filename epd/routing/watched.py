"""A request with the deaths of instances that served it, and the instances left for it. Pure."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from epd.errors import NoInstance, Stage, SuspectedFatal
from epd.routing.instances import Instance

MAX_DEATHS = 2
"""Number of deaths after which a request is rejected. A single death may be a coincidence."""

SAME_DEATH_S = 10.0
"""Time after its death in which an instance also fails unrelated requests, in seconds. No engine
restarts within that time."""

MAX_TENANT_DEATHS = 3
"""Number of deaths within `--suspect-s` after which a tenant's requests are in quarantine."""


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
