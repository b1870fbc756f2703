"""One request at an instance: counted while in progress, and judged by its end."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from epd.errors import Outcome, ProxyError
from epd.routing.health import Health
from epd.routing.instances import Instance
from epd.routing.load import Load


class Place:
    """A request's place at an instance, which counts as load until the context exits.

    Attributes:
        instance: the instance.
        rank: data-parallel rank of the request; None to let the instance choose.
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
        """Remove the request from the load."""
        self._load.end(self.rank)

    def __enter__(self) -> Self:
        return self.begin()

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(error)


class Use(Place):
    """One request at an instance. Each `begin` needs one `end`; or use it as a context manager."""

    __slots__ = ("_alone", "_begun", "_clock", "_health")

    def __init__(  # noqa: PLR0913 - a place, and the inputs of the judgement
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
        """Record the start of a good answer, which may still take long."""
        self._health.answered(self._clock())

    def end(self, error: BaseException | None = None) -> None:
        """Judge the instance by the request's end. A cancelled request does not count."""
        self._load.end(self.rank)
        outcome, rest_s = Outcome.NOTHING, None
        if error is None:
            outcome = Outcome.GOOD
        elif isinstance(error, ProxyError) and (self._alone or not error.engine_failed):
            outcome, rest_s = error.outcome, error.rest_s
        self._health.ended(outcome, self._clock(), begun=self._begun, rest_s=rest_s)
