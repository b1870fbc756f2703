"""Retries: the budget of concurrent retries, and the delay before each."""

import asyncio
import math
import random
from collections import deque
from dataclasses import dataclass
from typing import Self

from epd.errors import ProxyError, drop_tracebacks

SHARE = 0.2
"""Maximum share of concurrent requests that may be retries (Envoy's retry budget)."""
LEAST = 3
"""Number of retries that are always allowed."""
HELD_S = 1.0
"""Maximum time for which a retry counts, in seconds. A whole answer takes as long as its tokens."""
PATIENCE_S = 30.0
JITTER_S = 0.05
"""Upper bound of the random delay before the first retry; doubled for each further one (full
jitter: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/)."""


class Retries:
    """A retry budget for all requests of one kind.

    When an instance dies under load, all its requests need another one at the same moment. The
    budget admits them gradually, because together they would overload the remaining instances.

    Attributes:
        requests: number of requests in progress; `Tries` counts them.
        jitter_s: returns a random delay between two numbers of seconds.
    """

    def __init__(
        self, patience_s: float = PATIENCE_S, *, share: float = SHARE, least: int = LEAST
    ) -> None:
        """Start without requests. A retry waits at most `patience_s` seconds for its place."""
        self.requests = 0
        self._patience_s = patience_s
        self._share = share
        self._least = least
        # A generator of its own: other code in the process may seed the module's one.
        self.jitter_s = random.Random().uniform  # noqa: S311 - no secret
        self._again = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def tries(self, most: int) -> "Tries":
        """Return the tries of one request: a context manager for the whole request."""
        return Tries(self, most - 1)

    def release_place(self) -> None:
        self._again -= 1
        self._admit()

    async def wait_admission(self, patience_s: float = math.inf) -> bool:
        """Wait for a place in the budget; return False after `patience_s`, or the budget's own."""
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._admit()
        try:
            async with asyncio.timeout(min(patience_s, self._patience_s)):
                await place
        except TimeoutError:
            return place.done() and not place.cancelled()
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.release_place()
            raise
        return True

    def _admit(self) -> None:
        most = max(self._least, math.ceil(self._share * self.requests))
        while self._waiting and self._again < most:
            place = self._waiting.popleft()
            if not place.done():
                self._again += 1
                place.set_result(None)


@dataclass(slots=True, eq=False)
class Tries:
    """The tries of one request. The first one is free; each retry holds a place for a time."""

    _retries: Retries
    _left: int
    _number: int = 0
    _timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._retries.requests += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()
        self._retries.requests -= 1

    async def next_try(
        self, error: ProxyError, delay_s: float = 0.0, patience_s: float = math.inf
    ) -> None:
        """End a failed try, and wait until the next one may start, at least for the delay.

        Raises:
            ProxyError: `error` itself: the maximum of tries is reached, or no place in the budget
                was released within `patience_s` seconds, or the patience of the budget.
        """
        self._leave()
        if not self._left:
            raise error
        jitter_s = self._retries.jitter_s(0, JITTER_S * 2**self._number)
        self._left -= 1
        self._number += 1
        await asyncio.sleep(delay_s + jitter_s)
        if not await self._retries.wait_admission(patience_s):
            raise error
        self._timer = asyncio.get_running_loop().call_later(HELD_S, self._leave)
        drop_tracebacks(error)

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._retries.release_place()
