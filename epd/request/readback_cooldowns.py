"""Cooldowns of read-back: which prefill instance may read from which engine, and when. Pure.

After a failed read-back, the prefill instance skips that engine for a cooldown.
"""

import math
import time
from collections.abc import Callable

from ec_store.bounded import BoundedDict

REST_S = 60.0
"""Cooldown of a prefill instance for the blocks of one engine after a failed read, in seconds."""

HUNG_S = 600.0
"""Cooldown after a timeout, which costs a client all of `--prefill-timeout-s`, in seconds."""

MOST = 1024
"""Upper bound of the remembered instances and pairs."""


class Cooldowns:
    """Cooldowns, by the URL of a prefill instance and the id of a decode engine.

    A prefill instance without `bidirectional_kv_xfer` waits for the blocks of any engine until its
    request ends. So after a timeout, it reads the blocks of none.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until_s: BoundedDict[tuple[str, str | None], float] = BoundedDict(MOST)

    def may_read(self, prefill: str, engine: str) -> bool:
        """Return whether a prefill instance may read an engine's blocks."""
        now_s, until_s = self._clock(), self._until_s
        return all(until_s.get((prefill, source), -math.inf) <= now_s for source in (engine, None))

    def begin(self, prefill: str, engine: str, *, hung: bool) -> None:
        """Begin the cooldown after a failed read of an engine's blocks, or one that `hung`."""
        rest_s, source = (HUNG_S, None) if hung else (REST_S, engine)
        self._until_s[prefill, source] = self._clock() + rest_s
