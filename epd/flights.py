"""Single flight: concurrent callers of one key share one run."""

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
    """Runs by key, one at a time for each key. A run without waiters is cancelled.

    Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[V]] = {}
        self._tasks: set[asyncio.Task[V]] = set()

    def __contains__(self, key: K) -> bool:
        """Return whether a run of this key is in progress, which a caller can join."""
        return key in self._flights

    async def join(self, key: K, start: Start[V]) -> V:
        """Return the result of the run of this key; call `start` if there is no run.

        Every waiter receives an error of the run. Cancelling one waiter does not cancel the run for
        the others.
        """
        flight = self._flights.get(key) or self._add(key, asyncio.create_task(start()))
        return await self._wait(key, flight)

    async def try_join(self, key: K, start: Start[V]) -> V:
        """Join as `join` does, but take only a success from a run that began before this call.

        Raises:
            ProxyError: a run that began after this call failed.
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
        """Cancel all runs, and wait for their end."""
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
        """Close a run to further waiters."""
        if self._flights.get(key) is flight:
            del self._flights[key]
        if flight.task.done():
            self._tasks.discard(flight.task)
            if not flight.task.cancelled():
                flight.task.exception()  # mark it as retrieved: there may be no waiter left
