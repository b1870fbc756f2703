"""Cooldowns of KV read-back: after a failure, a prefill instance skips an engine. No I/O."""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from ec_store.bounded import BoundedDict

REST_S = 60.0
"""Cooldown of a prefill instance for the blocks of one engine after a failed read, in seconds."""

HUNG_S = 600.0
"""Cooldown after a timeout, which costs a client all of `--prefill-timeout-s`, in seconds."""

MOST = 1024
"""Upper bound of the remembered instances and pairs."""


class Rest(NamedTuple):
    """A cooldown that has just begun.

    Attributes:
        rest_s: length of the cooldown.
        engine: the engine to skip; None for all engines.
    """

    rest_s: float
    engine: str | None


class Rests:
    """The cooldowns, by prefill instance and decode engine.

    A prefill instance without `bidirectional_kv_xfer` waits for the blocks of any engine until its
    request ends. For an instance that has read blocks before, a timeout is attributed to the
    engine.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until_s: BoundedDict[tuple[str, str | None], float] = BoundedDict(MOST)
        self._able: BoundedDict[str, None] = BoundedDict(MOST)

    def over(self, prefill: str, engine: str) -> bool:
        """Return whether a prefill instance may read an engine's blocks.

        Args:
            prefill: URL of the prefill instance.
            engine: id of the decode engine.
        """
        now_s, until_s = self._clock(), self._until_s
        return all(until_s.get((prefill, one), -math.inf) <= now_s for one in (engine, None))

    def read(self, prefill: str) -> None:
        """Record an answer of an instance that was asked to read blocks."""
        self._able[prefill] = None

    def failed(self, prefill: str, engine: str, *, hung: bool) -> Rest | None:
        """Record a failure of an instance that was asked to read an engine's blocks.

        Args:
            prefill: URL of the prefill instance.
            engine: id of the decode engine.
            hung: whether it timed out.

        Returns:
            The new cooldown; None if one has begun already, as after concurrent failures.
        """
        now_s = self._clock()
        until_s = max(self._until_s.get((prefill, one), now_s) for one in (engine, None))
        if until_s > now_s + (REST_S if hung else 0):
            return None
        rest = Rest(REST_S, engine)
        if hung:
            rest = Rest(HUNG_S, engine if prefill in self._able else None)
            self._able.pop(prefill, None)
        self._until_s[prefill, rest.engine] = now_s + rest.rest_s
        return rest
