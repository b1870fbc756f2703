"""One run for all who want the same thing at the same moment."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True)
class _Flight(Generic[V]):
    task: asyncio.Task[V]
    waiters: int = 0


class Flights(Generic[K, V]):
    """Runs by key. One that nobody waits for any more is cancelled."""

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[V]] = {}
        self._tasks: set[asyncio.Task[V]] = set()

    async def join(self, key: K, start: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """The result of the run of this key; `start` is called where there is none.

        An error is every waiter's; a waiter that is cancelled leaves the run to the others.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(start()))
            self._tasks.add(flight.task)
            flight.task.add_done_callback(self._tasks.discard)
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if not flight.waiters:
                del self._flights[key]
                flight.task.cancel()

    async def close(self) -> None:
        """Cancel what still runs, and wait until it is gone."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
