"""Single flight: what several want at once is done once."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from epd.errors import ProxyError

T = TypeVar("T")


@dataclass(slots=True)
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    waiting: int = 0


class SingleFlight(Generic[T]):
    """Work by key, at most one of a key at a time. Belongs to one event loop.

    Work goes on for as long as anybody waits for it: one of them may leave. Whoever joined work
    that another had begun does not share its failure; its own try comes first.
    """

    def __init__(self) -> None:
        self._flights: dict[Hashable, _Flight[T]] = {}

    async def run(self, key: Hashable, work: Callable[[], Awaitable[T]]) -> T:
        """The result of the work of this key, begun here or by somebody else.

        Raises:
            ProxyError: it failed, and had been begun after this call.
        """
        begun = self._flights.get(key)
        if begun is not None:
            try:
                return await self._join(key, begun)
            except ProxyError:
                begun = self._flights.get(key)
        return await self._join(key, begun or self._begin(key, work))

    def _begin(self, key: Hashable, work: Callable[[], Awaitable[T]]) -> _Flight[T]:
        flight = self._flights[key] = _Flight(asyncio.ensure_future(_awaited(work)))
        flight.task.add_done_callback(lambda _: self._end(key, flight))
        return flight

    async def _join(self, key: Hashable, flight: _Flight[T]) -> T:
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                self._end(key, flight)
                flight.task.cancel()

    def _end(self, key: Hashable, flight: _Flight[T]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        if flight.task.done() and not flight.task.cancelled():
            flight.task.exception()  # nobody may be left to see it


async def _awaited(work: Callable[[], Awaitable[T]]) -> T:
    return await work()
