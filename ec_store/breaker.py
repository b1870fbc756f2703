"""A circuit breaker: after repeated failures, calls are skipped for a while."""

import logging
import time
from collections.abc import Callable

FAILURES = 3
OPEN_S = 5.0

logger = logging.getLogger("vllm.ec_store")


class Breaker:
    """Circuit breaker that opens after consecutive failures and closes after `open_s`.

    The first result after that decides: a single failure opens it again.
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
        """Create a closed breaker.

        Args:
            name: subject of the log message.
            failures: consecutive failures that open it.
            open_s: seconds that it stays open.
            clock: monotonic clock in seconds.
            warn: function that gets the log message each time it opens.
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
        """Return whether calls are to be skipped now."""
        return self._clock() < self._until_s

    def succeeded(self) -> None:
        """Record a successful call, which resets the count of failures."""
        self._failures = 0

    def failed(self, reason: object) -> None:
        """Record a failed call and its reason; enough of them open the breaker."""
        self._failures += 1
        if self._failures >= self._most and not self.open:
            self._until_s = self._clock() + self._open_s
            self._warn(f"{self._name} keeps failing, skipping it for {self._open_s:g} s: {reason}")
