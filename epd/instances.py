"""The vLLM servers behind the proxy, and whose turn it is."""

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
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
    """The instances by role, each role with a round-robin cursor, and what each has to do.

    A cursor goes on from request to request: one that started over with each request would send
    every request's first item to the same instance. Not thread-safe: it belongs to one event loop.
    """

    def __init__(self, instances: Iterable[Instance]) -> None:
        self._by_role: dict[Role, list[Instance]] = {role: [] for role in Role}
        for instance in instances:
            self._by_role[instance.role].append(instance)
        self._cursors = dict.fromkeys(Role, 0)
        self._load: Counter[Instance] = Counter()

    @property
    def load(self) -> Mapping[Instance, int]:
        """Requests under way, by instance; those that have none may be missing."""
        return self._load

    def of(self, *roles: Role) -> tuple[Instance, ...]:
        """All instances of these roles."""
        return tuple(instance for role in roles for instance in self._by_role[role])

    def pick(self, role: Role) -> Instance:
        """The next instance of this role, in turn.

        Raises:
            LookupError: there is none.
        """
        candidates = self._by_role[role]
        if not candidates:
            raise LookupError(f"no {role} instance")
        turn = self._cursors[role]
        self._cursors[role] = (turn + 1) % len(candidates)
        return candidates[turn]

    @contextmanager
    def using(self, instance: Instance) -> Iterator[None]:
        """Count a request of this instance as under way until the context is left."""
        self._load[instance] += 1
        try:
            yield
        finally:
            self._load[instance] -= 1
