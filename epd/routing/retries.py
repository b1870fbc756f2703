"""The one loop that tries again, and its budget."""

import asyncio
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TypeVar

from epd.errors import (
    NoInstance,
    ProxyError,
    UpstreamBusy,
    UpstreamFailed,
    UpstreamRejected,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from epd.routing.health import BUSY, asked_rest_s

T = TypeVar("T")

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

ELSEWHERE = BUSY | {
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.GATEWAY_TIMEOUT,
}
"""An instance's statuses that another one need not answer."""

Again = Callable[[ProxyError], float | None]
"""Says how long to wait before the next try, in seconds; None: there is none."""


class Retries:
    """Tries again, and sees to it that few do so at once.

    When an instance dies under load, all its requests want another one at the same moment. They
    get it one after the other: at once, they would be too much for those that are left.
    """

    def __init__(self) -> None:
        self._requests = 0
        self._again = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def run(self, attempt: Callable[[], Awaitable[T]], *, tries: int, again: Again) -> T:
        """What the first try that succeeds returns.

        Args:
            attempt: one try.
            tries: how many there are at most.
            again: asked after each failure but the last.

        Raises:
            ProxyError: the last try's.
        """
        self._requests += 1
        try:
            return await attempt()
        except ProxyError as error:
            return await self._further(attempt, tries - 1, again, error)
        finally:
            self._requests -= 1

    async def _further(
        self, attempt: Callable[[], Awaitable[T]], tries: int, again: Again, failure: ProxyError
    ) -> T:
        for number in range(tries):
            delay_s = again(failure)
            if delay_s is None:
                break
            await asyncio.sleep(delay_s + random.uniform(0, JITTER_S * 2**number))  # noqa: S311
            if not await self._admitted():
                break
            release = asyncio.get_running_loop().call_later(HELD_S, self._leave)
            try:
                return await attempt()
            except ProxyError as error:
                failure = error
            finally:
                if release.when() > asyncio.get_running_loop().time():  # it has not been called
                    release.cancel()
                    self._leave()
        raise failure

    def _leave(self) -> None:
        self._again -= 1
        self._admit()

    async def _admitted(self) -> bool:
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
        most = max(LEAST, math.ceil(SHARE * self._requests))
        while self._waiting and self._again < most:
            place = self._waiting.popleft()
            if not place.done():
                self._again += 1
                place.set_result(None)


def is_instances_fault(error: ProxyError) -> bool:
    """Whether another instance may do better: not where this one refused the request itself."""
    if isinstance(error, UpstreamRejected):
        return error.status in ELSEWHERE
    failed = isinstance(error, UpstreamFailed | UpstreamTimeout | UpstreamBusy | NoInstance)
    return failed and error.slug != "encode_metadata"


def retry_delay_s(error: ProxyError, *, others: bool, patience_s: float = 0.0) -> float | None:
    """How long to wait before an instance is tried after this error; None: no instance is.

    Args:
        error: what the last one ended in.
        others: whether there is one that was not tried.
        patience_s: for how long it may be waited until the same one has time.
    """
    if not is_instances_fault(error):
        return None
    if others:
        return 0.0
    rest_s = asked_rest_s(error)
    if rest_s is not None and rest_s <= patience_s:
        return rest_s
    # Too much to do, no answer in time, nobody there: the same once more would be no better.
    hopeless = UpstreamRejected | UpstreamBusy | UpstreamTimeout | UpstreamUnreachable
    return None if isinstance(error, hopeless) else 0.0
