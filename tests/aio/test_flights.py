import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from epd.aio import Flights
from epd.errors import ProxyError


class Work:
    """Runs that end when the test says so."""

    def __init__(self) -> None:
        self.started = 0
        self.cancelled = 0
        self.go = asyncio.Event()

    def start(self, error: Exception | None = None) -> Callable[[], Coroutine[Any, Any, int]]:
        async def run() -> int:
            self.started += 1
            number = self.started
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            if error:
                raise error
            return number

        return run


async def joined(flights: Flights[str, int], work: Work, waiters: int) -> list[asyncio.Task[int]]:
    tasks = [asyncio.create_task(flights.join("k", work.start())) for _ in range(waiters)]
    await asyncio.sleep(0.01)
    return tasks


async def test_waiters_share_one_run_and_the_next_gets_a_new_one() -> None:
    flights, work = Flights[str, int](), Work()
    tasks = await joined(flights, work, 3)
    other = asyncio.create_task(flights.join("other", work.start()))
    await asyncio.sleep(0.01)
    work.go.set()

    assert await asyncio.gather(*tasks) == [1, 1, 1]
    assert await other == 2
    assert await flights.join("k", work.start()) == 3


async def test_a_waiter_that_leaves_leaves_the_run_to_the_others() -> None:
    flights, work = Flights[str, int](), Work()
    first, second = await joined(flights, work, 2)
    first.cancel()
    await asyncio.wait([first])
    work.go.set()

    assert await second == 1
    assert first.cancelled()
    assert work.cancelled == 0


async def test_an_abandoned_run_is_cancelled_and_not_joined() -> None:
    flights, work = Flights[str, int](), Work()
    tasks = await joined(flights, work, 2)
    for task in tasks:
        task.cancel()
    late = asyncio.create_task(flights.join("k", work.start()))
    await asyncio.wait(tasks)
    await asyncio.sleep(0.01)
    work.go.set()

    assert await late in (1, 2)
    assert work.cancelled == work.started - 1


async def test_an_error_is_every_waiters() -> None:
    flights, work = Flights[str, int](), Work()
    tasks = [asyncio.create_task(flights.join("k", work.start(ValueError("no")))) for _ in range(2)]
    await asyncio.sleep(0.01)
    work.go.set()

    for task in tasks:
        with pytest.raises(ValueError, match="no"):
            await task


async def test_close_cancels_running_flights() -> None:
    flights, work = Flights[str, int](), Work()
    tasks = await joined(flights, work, 2)
    await flights.close()

    assert work.cancelled == 1
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)


async def test_a_failed_run_is_not_shared_with_requests_that_joined_it() -> None:
    flights: Flights[str, int] = Flights()
    runs: list[int] = []
    go = asyncio.Event()

    async def run() -> int:
        number = len(runs)
        runs.append(number)
        await go.wait()
        if number == 0:
            raise ProxyError("no")
        return number

    first = asyncio.create_task(flights.try_join("key", run))
    await asyncio.sleep(0)
    others = [asyncio.create_task(flights.try_join("key", run)) for _ in range(5)]
    await asyncio.sleep(0)
    go.set()

    with pytest.raises(ProxyError):
        await first
    assert await asyncio.gather(*others) == [1] * 5
    assert runs == [0, 1]


async def test_a_failed_flight_fails_all_its_callers_and_runs_once() -> None:
    flights: Flights[str, int] = Flights()
    runs: list[int] = []

    async def run() -> int:
        runs.append(1)
        await asyncio.sleep(0)
        raise ProxyError("no")

    waiting = [asyncio.create_task(flights.try_join("key", run)) for _ in range(5)]
    failures = await asyncio.gather(*waiting, return_exceptions=True)

    assert [type(failure) for failure in failures] == [ProxyError] * 5
    assert len(runs) == 2
