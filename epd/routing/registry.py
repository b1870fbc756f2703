"""Registry of the instances, which makes one membership of those that several sources name."""

import enum
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from epd.routing.instances import Instance, Role
from epd.routing.table import InstanceTable

Change = Literal["added", "removed", "refused"]
"""The change of an instance after a source has added or dropped it."""

CLASHES: Mapping[Role, frozenset[Role]] = {
    Role.ENCODE: frozenset(),
    Role.PREFILL: frozenset({Role.PREFILL_DECODE}),
    Role.DECODE: frozenset({Role.PREFILL_DECODE}),
    Role.PREFILL_DECODE: frozenset({Role.PREFILL, Role.DECODE}),
}
"""Roles that exclude each other, because a request would have two possible paths."""


class InstanceSource(enum.StrEnum):
    """Sources of instances. The first one has precedence for an instance's details."""

    CONFIG = "config"
    FILE = "file"
    API = "api"
    DNS = "dns"


class Member(NamedTuple):
    """An instance that sources name, admitted at `since_s` on the wall clock."""

    instance: Instance
    sources: tuple[InstanceSource, ...]
    since_s: float


class Registry:
    """Keeps the members of a table equal to the instances that its sources name.

    An instance is a member while at least one source names it. A member is never displaced: an
    instance that conflicts with it is refused, and admitted when the conflict ends. An instance
    that does not fit is refused too.
    """

    def __init__(
        self,
        table: InstanceTable,
        configured: Iterable[Instance] = (),
        *,
        fits: Callable[[Instance], bool] = lambda _: True,
        on_change: Callable[[Instance, Change, InstanceSource], None] = lambda *_: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Add the configured instances, without calls of `on_change`.

        `fits` tells which instances can be members. `clock` is a wall clock, in seconds.
        """
        self._table = table
        self._fits = fits
        self._clock = clock
        self._by_source: dict[InstanceSource, Sequence[Instance]] = {}
        self._since_s: dict[Instance, float] = {}
        self._refused: set[Instance] = set()
        self._on_change: Callable[[Instance, Change, InstanceSource], None] = lambda *_: None
        self.replace(InstanceSource.CONFIG, configured)
        self._on_change = on_change

    def replace(self, source: InstanceSource, instances: Iterable[Instance]) -> None:
        self._by_source[source] = tuple(instances)
        named = self._named()
        self._reweigh(named)
        for instance in [member for member in self._since_s if member not in named]:
            del self._since_s[instance]
            self._table.remove(instance)
            self._on_change(instance, "removed", source)
        self._refused &= named.keys()
        for instance, by in named.items():
            if instance not in self._since_s:
                self._admit(instance, by)

    def conflicting_member(self, instance: Instance) -> Instance | None:
        return next((member for member in self._since_s if _conflict(member, instance)), None)

    def sources(self, url: str) -> tuple[InstanceSource, ...]:
        return tuple(
            source
            for source in InstanceSource
            if any(instance.url == url for instance in self._by_source.get(source, ()))
        )

    @property
    def members(self) -> tuple[Member, ...]:
        named = {member.key: member for member in self._since_s}
        sources: dict[Instance, list[InstanceSource]] = {member: [] for member in self._since_s}
        for source in InstanceSource:
            for instance in self._by_source.get(source, ()):
                if (member := named.get(instance.key)) is not None:
                    sources[member].append(source)
        return tuple(
            Member(member, tuple(by), self._since_s[member]) for member, by in sources.items()
        )

    def _named(self) -> dict[Instance, InstanceSource]:
        named: dict[tuple[Role, str], tuple[Instance, InstanceSource]] = {}
        for source in InstanceSource:
            for instance in self._by_source.get(source, ()):
                named.setdefault(instance.key, (instance, source))
        return dict(named.values())

    def _reweigh(self, named: Iterable[Instance]) -> None:
        """Update members of which only the weight changed, and keep their load."""
        by_key = {instance.key: instance for instance in named}
        for old in list(self._since_s):
            new = by_key.get(old.key, old)
            if new != old == replace(new, weight=old.weight):
                self._since_s[new] = self._since_s.pop(old)
                self._table.set_weight(old, new)

    def _admit(self, instance: Instance, by: InstanceSource) -> None:
        if self._fits(instance) and self.conflicting_member(instance) is None:
            self._refused.discard(instance)
            self._since_s[instance] = self._clock()
            self._table.add(instance)
            self._on_change(instance, "added", by)
        elif instance not in self._refused:
            self._refused.add(instance)
            self._on_change(instance, "refused", by)


def _conflict(instance: Instance, other: Instance) -> bool:
    # A second role beside encode is allowed, but prefill cannot hand over to itself.
    twice = instance.url == other.url and {instance.role, other.role} == {Role.PREFILL, Role.DECODE}
    return twice or instance.role in CLASHES[other.role]
