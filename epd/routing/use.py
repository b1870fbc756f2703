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

    def begin(self) -> Self:
        """Count the request as load of the instance."""
        self._load.begin(self.rank)
        return self

    def end(self, error: BaseException | None = None) -> None:  # noqa: ARG002 - of `Use`
        """Count it no more."""
        self._load.end(self.rank)

    def __enter__(self) -> Self:
        """Begin."""
        return self.begin()

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""
        self.end(error)


class Use(Place):
    """One request of an instance. Each `begin` is followed by one `end`, or it is a context."""

    __slots__ = ("_alone", "_begun", "_clock", "_health")

    def __init__(  # noqa: PLR0913 - a place, and what judges its instance
        self,
        instance: Instance,
        load: Load,
        rank: int | None,
        health: Health,
        clock: Callable[[], float],
        *,
        alone: bool,
    ) -> None:
        super().__init__(instance, load, rank)
        self._health = health
        self._clock = clock
        self._alone = alone

    def begin(self) -> Self:
        """Count the request as load of the instance."""
        self._load.begin(self.rank)
        self._begun = self._health.begun()
        return self

    def answered(self) -> None:
        """The instance has begun to answer well; its answer may yet take long."""
        self._health.answered(self._clock())

    def end(self, error: BaseException | None = None) -> None:
        """Judge the instance by how the request has ended; a cancelled one says nothing."""
        self._load.end(self.rank)
        outcome, rest_s = Outcome.NOTHING, None
        if error is None:
            outcome = Outcome.GOOD
        elif isinstance(error, ProxyError) and (self._alone or not error.engine_failed):
            outcome, rest_s = error.outcome, error.rest_s
        self._health.ended(outcome, self._clock(), begun=self._begun, rest_s=rest_s)
