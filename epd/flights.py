"""One run for all who want the same thing at the same moment."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from epd.errors import ProxyError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

Start = Callable[[], Coroutine[Any, Any, V]]


@dataclass(slots=True)
class _Flight(Generic[V]):
    task: asyncio.Task[V]
    waiters: int = 0


class Flights(Generic[K, V]):
    """Runs by key, one of a key at a time. One that nobody waits for any more is cancelled.

    Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[V]] = {}
        self._tasks: set[asyncio.Task[V]] = set()

    def __contains__(self, key: K) -> bool:
        """Whether one of this key runs, which others can join."""
        return key in self._flights

    async def join(self, key: K, start: Start[V]) -> V:
        """The result of the run of this key; `start` is called where there is none.

        An error is every waiter's; a waiter that is cancelled leaves the run to the others.
        """
        flight = self._flights.get(key) or self._add(key, asyncio.create_task(start()))
        return await self._wait(key, flight)

    async def try_join(self, key: K, start: Start[V]) -> V:
        """As `join`, but a run that had begun before this call shares its success alone.

        Raises:
            ProxyError: a run failed that was begun after this call.
        """
        begun = self._flights.get(key)
        if begun is not None:
            try:
                return await self._wait(key, begun)
            except ProxyError:
                begun = self._flights.get(key)
        flight = begun or self._add(key, asyncio.create_task(start()))
        return await self._wait(key, flight)

    async def close(self) -> None:
        """Cancel what still runs, and wait until it is gone."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _add(self, key: K, task: asyncio.Task[V]) -> _Flight[V]:
        flight = self._flights[key] = _Flight(task)
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._land(key, flight))
        return flight

    async def _wait(self, key: K, flight: _Flight[V]) -> V:
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if not flight.waiters and not flight.task.done():
                self._land(key, flight)
                flight.task.cancel()

    def _land(self, key: K, flight: _Flight[V]) -> None:
        """Let nobody join it any more."""
        if self._flights.get(key) is flight:
            del self._flights[key]
        if flight.task.done():
            self._tasks.discard(flight.task)
            if not flight.task.cancelled():
                flight.task.exception()  # nobody may be left to see it
