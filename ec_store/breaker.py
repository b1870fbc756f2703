"""A circuit breaker: what keeps failing is left alone for a while."""

import logging
import time
from collections.abc import Callable

FAILURES = 3
OPEN_S = 5.0

logger = logging.getLogger("vllm.ec_store")


class Breaker:
    """Opens after some failures in a row, and lets calls through again after a while.

    The first call after that decides: one failure opens it again.
    """

    def __init__(
        self,
        name: str,
        *,
        failures: int = FAILURES,
        open_s: float = OPEN_S,
        clock: Callable[[], float] = time.monotonic,
        warn: Callable[[str], object] = logger.warning,
    ) -> None:
        """Begin closed.

        Args:
            name: what the log calls it.
            failures: how many in a row open it.
            open_s: for how long.
            clock: monotonic.
            warn: told when it opens.
        """
        self._name = name
        self._most = failures
        self._open_s = open_s
        self._clock = clock
        self._warn = warn
        self._failures = 0
        self._until_s = 0.0

    @property
    def open(self) -> bool:
        """Whether to leave it alone."""
        return self._clock() < self._until_s

    def succeeded(self) -> None:
        """A call came through."""
        self._failures = 0

    def failed(self, reason: object) -> None:
        """A call did not, for this reason."""
        self._failures += 1
        if self._failures >= self._most and not self.open:
            self._until_s = self._clock() + self._open_s
            self._warn(f"{self._name}: left alone for {self._open_s:g} s: {reason}")
