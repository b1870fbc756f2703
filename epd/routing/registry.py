"""Who takes part: what several sources say, settled into one membership."""

import enum
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

from epd.routing.instances import Instance, Role


class Source(enum.StrEnum):
    """Who says that an instance takes part. Of two that differ in its details the first counts."""

    CONFIG = "config"
    FILE = "file"
    API = "api"
    DNS = "dns"


Change = Literal["added", "removed", "refused"]
"""What has become of an instance that a source names, or names no more."""

CLASHES: Mapping[Role, frozenset[Role]] = MappingProxyType(
    {
        Role.ENCODE: frozenset(),
        Role.PREFILL: frozenset({Role.PREFILL_DECODE}),
        Role.DECODE: frozenset({Role.PREFILL_DECODE}),
        Role.PREFILL_DECODE: frozenset({Role.PREFILL, Role.DECODE}),
    }
)
"""Roles that do not take part together: a request would not know which way to go."""


class Table(Protocol):
    """What the settled membership is for."""

    def add(self, instance: Instance) -> None:
        """Let an instance take part."""

    def remove(self, instance: Instance) -> None:
        """Give it no further request."""

    def reweigh(self, old: Instance, new: Instance) -> None:
        """Have an instance that takes part weigh what `new` says, which is the same otherwise."""


class Member(NamedTuple):
    """An instance that takes part.

    Attributes:
        instance: the one.
        sources: who says so.
        since_s: since when, on the wall clock.
    """

    instance: Instance
    sources: tuple[Source, ...]
    since_s: float


class Registry:
    """Keeps a table's membership to what its sources say.

    An instance takes part for as long as any source names it. Who takes part already is never
    displaced: what clashes with it is refused, and comes in when nothing is in its way any more. So
    is what does not fit.
    """

    def __init__(
        self,
        table: Table,
        configured: Iterable[Instance] = (),
        *,
        fits: Callable[[Instance], bool] = lambda _: True,
        on_change: Callable[[Instance, Change, Source], None] = lambda *_: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Begin with what is configured, of which nobody is told.

        Args:
            table: kept to the membership.
            configured: what `Source.CONFIG` says.
            fits: whether an instance can take part at all.
            on_change: told what has become of whom, and by which source.
            clock: seconds of the wall clock.
        """
        self._table = table
        self._fits = fits
        self._clock = clock
        self._said: dict[Source, Sequence[Instance]] = {}
        self._since_s: dict[Instance, float] = {}
        self._refused: set[Instance] = set()
        self._on_change: Callable[[Instance, Change, Source], None] = lambda *_: None
        self.replace(Source.CONFIG, configured)
        self._on_change = on_change

    def replace(self, source: Source, instances: Iterable[Instance]) -> None:
        """Take what a source says now in place of what it said before."""
        self._said[source] = tuple(instances)
        named = self._named()
        self._reweigh(named)
        for instance in [one for one in self._since_s if one not in named]:
            del self._since_s[instance]
            self._table.remove(instance)
            self._on_change(instance, "removed", source)
        self._refused &= named.keys()
        for instance, by in named.items():
            if instance not in self._since_s:
                self._admit(instance, by)

    def clash(self, instance: Instance) -> Instance | None:
        """Who takes part that this one cannot take part beside."""
        return next((one for one in self._since_s if _clash(one, instance)), None)

    def sources(self, url: str) -> tuple[Source, ...]:
        """Who names an instance with this URL."""
        return tuple(
            source for source in Source if any(one.url == url for one in self._said.get(source, ()))
        )

    @property
    def members(self) -> tuple[Member, ...]:
        """Who takes part."""
        named = {one.key: one for one in self._since_s}
        sources: dict[Instance, list[Source]] = {one: [] for one in self._since_s}
        for source in Source:
            for said in self._said.get(source, ()):
                if (one := named.get(said.key)) is not None:
                    sources[one].append(source)
        return tuple(Member(one, tuple(by), self._since_s[one]) for one, by in sources.items())

    def _named(self) -> dict[Instance, Source]:
        """All that are named, and by whom first."""
        named: dict[tuple[Role, str], tuple[Instance, Source]] = {}
        for source in Source:
            for one in self._said.get(source, ()):
                named.setdefault(one.key, (one, source))
        return dict(named.values())

    def _reweigh(self, named: Iterable[Instance]) -> None:
        """Whose weight alone is another stays, and what it has to do does."""
        said = {one.key: one for one in named}
        for old in list(self._since_s):
            new = said.get(old.key, old)
            if new != old == replace(new, weight=old.weight):
                self._since_s[new] = self._since_s.pop(old)
                self._table.reweigh(old, new)

    def _admit(self, instance: Instance, by: Source) -> None:
        if self._fits(instance) and self.clash(instance) is None:
            self._refused.discard(instance)
            self._since_s[instance] = self._clock()
            self._table.add(instance)
            self._on_change(instance, "added", by)
        elif instance not in self._refused:
            self._refused.add(instance)
            self._on_change(instance, "refused", by)


def _clash(one: Instance, other: Instance) -> bool:
    # One that encodes and does something else is two; prefill cannot hand over to itself.
    twice = one.url == other.url and {one.role, other.role} == {Role.PREFILL, Role.DECODE}
    return twice or one.role in CLASHES[other.role]
