"""Topology of a fleet: the roles of its instances, by a name such as `1e1pd`. No I/O."""

import re
from dataclasses import dataclass
from typing import Self

from epd.routing.instances import Role
from epd.tools.up.devices import LETTERS

_NAME = re.compile(
    r"(?:(?P<e>[1-9]\d?)e)?"
    r"(?:(?P<epd>[1-9]\d?)epd|(?P<pd>[1-9]\d?)pd|(?P<p>[1-9]\d?)p(?P<d>[1-9]\d?)d)"
)


@dataclass(frozen=True, slots=True)
class Topology:
    """Role of each instance of a fleet.

    Attributes:
        local: whether the instances that prefill and decode encode too, and write to the store.
    """

    roles: tuple[Role, ...]
    local: bool = False

    @classmethod
    def parse(cls, name: str) -> Self:
        """Read a name such as `1e1pd`, `2epd` or `1p1d`; raise `ValueError` for another form."""
        match = _NAME.fullmatch(name.lower())
        if match is None:
            raise ValueError(f"{name!r} is not a topology such as 1e1pd, 2epd, 1e1p1d or 1p1d")
        counts = {role: int(match[letters] or 0) for letters, role in LETTERS.items()}
        counts[Role.PREFILL_DECODE] += int(match["epd"] or 0)
        roles = (role for role, count in counts.items() for _ in range(count))
        return cls(tuple(roles), local=match["epd"] is not None)

    @property
    def uses_store(self) -> bool:
        """Whether an instance writes encoder outputs to the store."""
        return self.local or Role.ENCODE in self.roles
