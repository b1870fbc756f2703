"""What a name leads to, while its answers fail and come back; pure."""

import math
from collections.abc import Collection

EMPTY_S = 60.0
"""A name has to have no address for so long before its last ones are let go."""


class Sightings:
    """The addresses of one name that count.

    A resolver that fails says nothing of the instances: what it said before stays. One that says
    that there are none may be right, as where all were taken away, and is believed in time.
    """

    def __init__(self, empty_s: float = EMPTY_S) -> None:
        """Begin with none; `empty_s` is how long none are seen before they are let go."""
        self.current: frozenset[str] = frozenset()
        self._empty_s = empty_s
        self._empty_since_s = math.inf

    def saw(self, addresses: Collection[str], now_s: float) -> None:
        """An answer has come."""
        if addresses:
            self.current = frozenset(addresses)
            self._empty_since_s = math.inf
            return
        self._empty_since_s = min(self._empty_since_s, now_s)
        if now_s - self._empty_since_s >= self._empty_s:
            self.current = frozenset()

    def failed(self) -> None:
        """None has come: the time in which there were none begins anew."""
        self._empty_since_s = math.inf
