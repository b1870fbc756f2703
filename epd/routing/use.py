"""One request of an instance: counted while it is under way, and judged by how it ends."""

from collections.abc import Callable
from http import HTTPStatus
from types import TracebackType
from typing import Self

from epd.errors import ProxyError
from epd.routing.health import Health, Outcome, asked_rest_s, judged
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

    def __enter__(self) -> Self:
        """It is taken."""
        self._load.begin(self.rank)
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """It is free again."""
        self._load.end(self.rank)


class Use:
    """One request of an instance."""

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

    def __enter__(self) -> Self:
        """It goes to the instance."""
        self._place.__enter__()
        self._begun = self._health.begun()
        return self

    def answered(self) -> None:
        """The instance has begun to answer well; its answer may yet take long."""
        self._health.answered(self._clock())

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """It has ended, and how."""
        self._place.__exit__(kind, error, trace)
        self._health.ended(
            self._outcome(error), self._clock(), begun=self._begun, rest_s=asked_rest_s(error)
        )

    def _outcome(self, error: BaseException | None) -> Outcome:
        if error is None:
            return Outcome.GOOD
        if not isinstance(error, ProxyError):
            return Outcome.NOTHING
        excused = not self._alone and error.answered == HTTPStatus.INTERNAL_SERVER_ERROR
        return Outcome.NOTHING if excused else judged(error)
