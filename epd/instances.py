"""The vLLM servers behind the proxy, and whose turn it is."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Role(enum.StrEnum):
    """The stage an instance serves."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"
    PREFILL_DECODE = "prefill_decode"


@dataclass(frozen=True, slots=True)
class Instance:
    """One vLLM server.

    Attributes:
        role: the stage it serves.
        url: base URL without a trailing slash, such as `http://host:8001`.
    """

    role: Role
    url: str


class InstanceTable:
    """The instances by role, each role with a round-robin cursor.

    A cursor goes on from request to request: one that started over with each request would send
    every request's first item to the same instance. Not thread-safe: it belongs to one event loop.
    """

    def __init__(self, instances: Iterable[Instance]) -> None:
        self._by_role: dict[Role, list[Instance]] = {role: [] for role in Role}
        for instance in instances:
            self._by_role[instance.role].append(instance)
        self._cursors = dict.fromkeys(Role, 0)

    def of(self, *roles: Role) -> tuple[Instance, ...]:
        """All instances of these roles."""
        return tuple(instance for role in roles for instance in self._by_role[role])

    def pick(self, role: Role) -> Instance:
        """The next instance of this role.

        Raises:
            LookupError: there is none.
        """
        return self.pick_many(role, 1)[0]

    def pick_many(self, role: Role, count: int) -> tuple[Instance, ...]:
        """The next `count` instances of this role, in turn.

        Raises:
            LookupError: there is none.
        """
        candidates = self._by_role[role]
        if not candidates:
            raise LookupError(f"no {role} instance")
        start = self._cursors[role]
        self._cursors[role] = (start + count) % len(candidates)
        return tuple(candidates[(start + turn) % len(candidates)] for turn in range(count))
