"""Who reads nothing of whose blocks for a while, since it could not. No I/O."""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

REST_S = 60.0
"""How long a prefill instance reads nothing of an engine whose blocks it has failed to read."""

HUNG_S = 600.0
"""The same where it has not answered: that has cost a client all of `--prefill-timeout-s`."""

MOST = 1024
"""Of what is remembered: instances come and go."""


class Rest(NamedTuple):
    """A rest that has just begun.

    Attributes:
        rest_s: how long it is.
        engine: whose blocks are not read; None: nobody's are.
    """

    rest_s: float
    engine: str | None


class Rests:
    """Which prefill instance reads of which decode engine no more, for a while.

    A prefill instance without `bidirectional_kv_xfer` waits for the blocks of any engine until its
    request's end; one that has read from some can, and then it is this engine's fault.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Nobody rests."""
        self._clock = clock
        self._until_s: dict[tuple[str, str | None], float] = {}
        self._able: dict[str, None] = {}

    def over(self, prefill: str, engine: str) -> bool:
        """Whether an instance may be told of an engine's blocks.

        Args:
            prefill: its URL.
            engine: the id of decode's.
        """
        now_s, until_s = self._clock(), self._until_s
        return all(until_s.get((prefill, one), -math.inf) <= now_s for one in (engine, None))

    def read(self, prefill: str) -> None:
        """An instance has answered that was told of blocks."""
        self._able[prefill] = None
        while len(self._able) > MOST:
            del self._able[next(iter(self._able))]

    def failed(self, prefill: str, engine: str, *, hung: bool) -> Rest | None:
        """An instance has failed that was told of an engine's blocks.

        Args:
            prefill: its URL.
            engine: the id of decode's.
            hung: whether it has not answered at all.

        Returns:
            What begins; None: it has begun already, as several failed at once.
        """
        now_s = self._clock()
        self._until_s = {pair: at_s for pair, at_s in self._until_s.items() if at_s > now_s}
        until_s = max(self._until_s.get((prefill, one), now_s) for one in (engine, None))
        if until_s > now_s + (REST_S if hung else 0):
            return None
        rest = Rest(REST_S, engine)
        if hung:
            rest = Rest(HUNG_S, engine if prefill in self._able else None)
            self._able.pop(prefill, None)
        while len(self._until_s) >= MOST:
            del self._until_s[next(iter(self._until_s))]
        self._until_s[prefill, rest.engine] = now_s + rest.rest_s
        return rest
