"""How many instances serve each stage."""

import re
from dataclasses import dataclass
from typing import Self

from epd.routing.instances import Role

_NAME = re.compile(r"(?:(?P<e>[1-9]\d?)e)?(?:(?P<pd>[1-9]\d?)pd|(?P<p>[1-9]\d?)p(?P<d>[1-9]\d?)d)")


@dataclass(frozen=True, slots=True)
class Topology:
    """How many instances serve each stage.

    Attributes:
        roles: the role of each instance.
    """

    roles: tuple[Role, ...]

    @classmethod
    def parse(cls, name: str) -> Self:
        """Read a name such as `1e1pd`, `2e1p2d` or, without encode instances, `1p1d`.

        Raises:
            ValueError: it is no such name.
        """
        match = _NAME.fullmatch(name.lower())
        if match is None:
            raise ValueError(f"{name!r} is not a topology such as 1e1pd, 1e1p1d or 1p1d")
        counts = {
            Role.ENCODE: match["e"],
            Role.PREFILL: match["p"],
            Role.DECODE: match["d"],
            Role.PREFILL_DECODE: match["pd"],
        }
        return cls(tuple(role for role, count in counts.items() for _ in range(int(count or 0))))
