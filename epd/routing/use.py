"""One request of an instance: counted while it is under way, and judged by how it ends."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from epd.errors import Outcome, ProxyError
from epd.routing.health import Health
from epd.routing.instances import Instance
from epd.routing.load import Load


class Place:
    """A request's place at an instance, which counts as load while the context lasts.

    Attributes:
        instance: the one.
        rank: the data-parallel rank that it is for; None: the instance sees to it.
    """

    __slots__ = ("_load", "instance", "rank")

    def __init__(self, instance: Instance, load: Load, rank: int | None = None) -> None:
        self.instance = instance
        self._load = load
        self.rank = load.ranks.next() if load.ranks is not None and rank is None else rank

    def begin(self) -> None:
        """Count the request as load of the instance."""
        self._load.begin(self.rank)

    def end(self) -> None:
        """Count it no more."""
        self._load.end(self.rank)

    def __enter__(self) -> Self:
        """Begin."""
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self.end()


class Use:
    """One request of an instance. Each `begin` is followed by one `end`, or it is a context."""

    __slots__ = ("_alone", "_begun", "_clock", "_health", "_place")

    def __init__(
        self, place: Place, health: Health, clock: Callable[[], float], *, alone: bool
    ) -> None:
        self._place = place
        self._health = health
        self._clock = clock
        self._alone = alone

    @property
    def rank(self) -> int | None:
        """The data-parallel rank that it is for; None: the instance sees to it."""
        return self._place.rank

    def begin(self) -> Self:
        """Count the request as load of the instance."""
        self._place.begin()
        self._begun = self._health.begun()
        return self

    def answered(self) -> None:
        """The instance has begun to answer well; its answer may yet take long."""
        self._health.answered(self._clock())

    def end(self, error: BaseException | None) -> None:
        """Judge the instance by how the request has ended; a cancelled one says nothing."""
        self._place.end()
        outcome, rest_s = Outcome.NOTHING, None
        if error is None:
            outcome = Outcome.GOOD
        elif isinstance(error, ProxyError) and (self._alone or not error.engine_failed):
            outcome, rest_s = error.outcome, error.rest_s
        self._health.ended(outcome, self._clock(), begun=self._begun, rest_s=rest_s)

    def __enter__(self) -> Self:
        """Begin."""
        return self.begin()

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""
        self.end(error)
