"""The addresses of a name while its lookups fail and recover. Pure."""

import math
from collections.abc import Collection

EMPTY_S = 60.0
"""Time for which a name must have no address before its last addresses are dropped, in seconds."""


class Sightings:
    """The effective addresses of one name.

    A failing resolver says nothing about the instances: their addresses stay. An empty answer may
    be true, as after scaling to zero, and takes effect after a delay.
    """

    def __init__(self, empty_s: float = EMPTY_S) -> None:
        """Start without addresses. `empty_s` is the delay of an empty answer, in seconds."""
        self.current: frozenset[str] = frozenset()
        self._empty_s = empty_s
        self._empty_since_s = math.inf

    def saw(self, addresses: Collection[str], now_s: float) -> None:
        """Record the answer of a lookup."""
        if addresses:
            self.current = frozenset(addresses)
            self._empty_since_s = math.inf
            return
        self._empty_since_s = min(self._empty_since_s, now_s)
        if now_s - self._empty_since_s >= self._empty_s:
            self.current = frozenset()

    def failed(self) -> None:
        """Record a failed lookup: it restarts the delay of an empty answer."""
        self._empty_since_s = math.inf
