"""Forecast of encodes: the seconds until an item is encoded, on an encode instance or a consumer.

Both sides use the speeds of `epd.routing.encode_work`. Requests of other clients at an encode
instance count as the mean of this proxy's. What this proxy has left with consumers waits there for
an encode too.
"""

from collections.abc import Callable, Sequence

from epd.routing.instances import CONSUMERS, Instance, Role
from epd.routing.load import Load
from epd.routing.rendezvous import distances
from epd.routing.table import InstanceTable

ASSUMED_S = 1e-4
"""Time of each token if no speed is known: 10,000 tokens per second."""


class EncodeQueue:
    """Queue of an encode instance, with the items that are planned for it."""

    def __init__(self, instance: Instance, load: Load, usual_s: float) -> None:
        """Forecast with the instance's own time of each token, or the usual one."""
        self.instance = instance
        self.load = load
        self.token_s = _token_s(load, usual_s)
        others = load.value - load.under_way
        self._tokens = load.encode.tokens + others * load.encode.mean_tokens

    def finish_s(self, tokens: int) -> float:
        """Return the time until a new item is encoded."""
        return (self._tokens + tokens) * self.token_s

    def add_item(self, tokens: int) -> None:
        self._tokens += tokens


class Forecast:
    """Forecast for the items of one request. Each item counts in the forecast of the next one.

    Attributes:
        token_s: mean time of each token at the encode instances; None if none is known.
    """

    def __init__(
        self, table: InstanceTable, fits: Callable[[Instance], bool] | None = None
    ) -> None:
        """Forecast by the present load of the encode instances that fit; None: all do."""
        usable = [
            (candidate.instance, candidate.load)
            for candidate in table.usable_candidates(Role.ENCODE)
            if fits is None or fits(candidate.instance)
        ]
        self.token_s = mean_token_s([load for _, load in usable])
        usual_s = ASSUMED_S if self.token_s is None else self.token_s
        self._queues = [EncodeQueue(*candidate, usual_s) for candidate in usable]

    def best_queue(self, tokens: int, key: str) -> EncodeQueue | None:
        """Return the queue in which an item is encoded first; None without an instance.

        Of those with the same number of milliseconds, take the one nearest to the item's key.
        """
        if not self._queues:
            return None
        loads = [queue.load for queue in self._queues]
        far = distances(loads, key.encode("utf-8", "surrogatepass"))
        costs = [
            (round(queue.finish_s(tokens), 3), away)
            for queue, away in zip(self._queues, far, strict=True)
        ]
        return self._queues[costs.index(min(costs))]

    def longest_s(self, tokens: int) -> float:
        """Return an upper bound of the time until items of this many tokens are encoded.

        It is 0 while no speed is known.
        """
        if self.token_s is None or not self._queues:
            return 0.0
        return min([queue.finish_s(tokens) for queue in self._queues])

    @property
    def several(self) -> bool:
        return len(self._queues) > 1


def consumer_load(table: InstanceTable, consumer: Instance | None) -> tuple[float, float]:
    """Return the requests and the encoder tokens of this proxy at an engine of a consumer.

    The consumer has a place for the request; None for the one with the lowest load.
    """
    loads: Sequence[Load] = [
        candidate.load
        for candidate in table.usable_candidates(*CONSUMERS)
        if consumer is None or candidate.instance == consumer
    ]
    if not loads:
        return 0.0, 0.0
    load = min(loads, key=lambda consumer_load: consumer_load.pressure)
    requests = load.value - (consumer is not None)  # its place counts as load already
    return max(0, requests) / len(load.engines), load.encode.tokens / len(load.engines)


def mean_token_s(loads: Sequence[Load]) -> float | None:
    """Return the mean of the known times of each token; None if none is known."""
    known = [token_s for load in loads if (token_s := load.encode.token_s) is not None]
    return sum(known) / len(known) if known else None


def encode_work_s(loads: Sequence[Load]) -> float:
    """Return the predicted time of this proxy's encodes at these instances, in seconds."""
    mean_s = mean_token_s(loads)
    usual_s = ASSUMED_S if mean_s is None else mean_s
    return sum(load.encode.tokens * _token_s(load, usual_s) for load in loads)


def _token_s(load: Load, usual_s: float) -> float:
    own_s = load.encode.token_s
    return usual_s if own_s is None else own_s
