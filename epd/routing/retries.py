"""Retries: how many requests may be at a further try at once, and how long each waits."""

import asyncio
import math
import random
from collections import deque
from typing import Self

from epd.errors import ProxyError

SHARE = 0.2
"""Of the requests under way, how many may be at a further try at once (Envoy's retry budget)."""
LEAST = 3
"""So many may be, however few are under way."""
HELD_S = 1.0
"""How long a further try counts at most: a whole answer takes as long as its tokens."""
PATIENCE_S = 30.0
"""How long a further try waits for others to end before it is given up."""
JITTER_S = 0.05
"""Before the first further try it waits up to this long, before each next one twice as long (full
jitter: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/)."""


class Retries:
    """A budget of retries for all requests of one kind.

    When an instance dies under load, all its requests want another one at the same moment. They
    get it one after the other: at once, they would be too much for those that are left.

    Attributes:
        requests: how many are under way; `Tries` counts them.
        jitter_s: draws a delay between two numbers of seconds.
    """

    def __init__(self) -> None:
        self.requests = 0
        # Not the module's generator: whoever shares the process may give that one a seed.
        self.jitter_s = random.Random().uniform  # noqa: S311 - no secret
        self._again = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def tries(self, most: int) -> "Tries":
        """Return the tries of one request: a context that lasts as long as the request."""
        return Tries(self, most)

    def leave(self) -> None:
        """Free the place of a further try, for `Tries` alone."""
        self._again -= 1
        self._admit()

    async def admitted(self) -> bool:
        """Wait for a place in the budget; False where none came free in time."""
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._admit()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await place
        except TimeoutError:
            return place.done() and not place.cancelled()
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._again -= 1
                self._admit()
            raise
        return True

    def _admit(self) -> None:
        most = max(LEAST, math.ceil(SHARE * self.requests))
        while self._waiting and self._again < most:
            place = self._waiting.popleft()
            if not place.done():
                self._again += 1
                place.set_result(None)


class Tries:
    """The tries of one request. The first one is free; each further one has a place for a time."""

    __slots__ = ("_left", "_number", "_retries", "_timer")

    def __init__(self, retries: Retries, most: int) -> None:
        self._retries = retries
        self._left = most - 1
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        """Begin the first try."""
        self._retries.requests += 1
        return self

    def __exit__(self, *_: object) -> None:
        """End the last one."""
        self._leave()
        self._retries.requests -= 1

    async def another(self, error: ProxyError, delay_s: float = 0.0) -> None:
        """End a try that has failed, and wait until the next one may begin.

        Args:
            error: what it ended in.
            delay_s: the least delay.

        Raises:
            ProxyError: `error`: there were as many tries as there may be, or no place in the
                budget became free in time.
        """
        self._leave()
        if not self._left:
            raise error
        jitter_s = self._retries.jitter_s(0, JITTER_S * 2**self._number)
        self._left -= 1
        self._number += 1
        await asyncio.sleep(delay_s + jitter_s)
        if not await self._retries.admitted():
            raise error
        self._timer = asyncio.get_running_loop().call_later(HELD_S, self._leave)

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._retries.leave()
