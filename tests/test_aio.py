"""Time limits, task groups, concurrent calls and single flight."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from epd.aio import Flights, cancel_after, gather_first
from epd.edge.drain import Bounded, Drain
from epd.errors import Overloaded, UpstreamTimeout


async def lose_one() -> None:
    """Wait without end, and lose the first cancellation, as `asyncio.wait_for` of 3.11 may."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.sleep(30)
        pytest.fail("the second cancellation did not come")


def cancelling() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def test_work_within_its_deadline_is_not_cancelled() -> None:
    with cancel_after(30):
        await asyncio.sleep(0)

    assert cancelling() == 0


@pytest.mark.parametrize("lost", [False, True])
async def test_a_task_that_ignores_its_cancellation_is_cancelled_again(lost: bool) -> None:
    with pytest.raises(TimeoutError), cancel_after(0.01):
        await (lose_one() if lost else asyncio.Event().wait())

    assert cancelling() == 0


async def test_an_error_during_cancellation_is_raised() -> None:
    async def work() -> None:
        with cancel_after(0.01):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise KeyError from None

    with pytest.raises(KeyError):
        await work()

    assert cancelling() == 0


async def test_a_result_despite_cancellation_is_kept() -> None:
    with cancel_after(0.01):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            result = "the answer"
    await asyncio.sleep(0)

    assert (result, cancelling()) == ("the answer", 0)


@pytest.mark.parametrize("lost", [False, True])
async def test_the_shorter_of_two_nested_deadlines_raises_the_timeout(lost: bool) -> None:
    inner: list[type[BaseException]] = []

    async def work() -> None:
        try:
            with cancel_after(30):
                await (lose_one() if lost else asyncio.Event().wait())
        except BaseException as end:
            inner.append(type(end))
            raise

    with pytest.raises(TimeoutError), cancel_after(0.01):
        await work()

    assert inner == [asyncio.CancelledError]


@pytest.mark.parametrize("limit_s", [0.0, 30.0])
async def test_a_cancellation_from_outside_takes_effect(limit_s: float) -> None:
    async def work() -> None:
        with cancel_after(limit_s):
            cancel.set()
            await lose_one() if limit_s == 0 else await asyncio.Event().wait()

    cancel = asyncio.Event()
    task = asyncio.create_task(work())
    await cancel.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def fails() -> None:
    await asyncio.sleep(0)
    raise ValueError("failed")


async def lasts() -> None:
    await asyncio.sleep(60)


async def fails_together() -> None:
    """Let one of two calls fail, as a failed encode does."""
    with pytest.raises(ValueError, match="failed"):
        await gather_first(lambda call: call(), [fails, lasts], 2)


async def test_a_failure_leaves_no_cancellation_behind() -> None:
    await fails_together()

    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.parametrize("cut", [False, True])
async def test_after_a_failure_the_time_of_a_request_still_ends_in_its_own_error(cut: bool) -> None:
    drain = Drain()

    async def request() -> None:
        with Bounded(drain, time.monotonic() + (60 if cut else 0.05)):
            await fails_together()
            await lasts()

    task = asyncio.create_task(request())
    await asyncio.sleep(0.01)
    if cut:
        drain.cut_off()

    with pytest.raises(Overloaded if cut else UpstreamTimeout):
        await task


async def test_a_cancellation_in_the_moment_of_a_failure_is_not_lost() -> None:
    went_on = False

    async def leaves_and_fails() -> None:
        await asyncio.sleep(0)
        task.cancel()
        raise ValueError("failed")

    async def request() -> None:
        nonlocal went_on
        with suppress(ValueError):
            await gather_first(lambda call: call(), [leaves_and_fails, lasts], 2)
        went_on = True

    task = asyncio.create_task(request())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not went_on


async def test_values_come_in_order_and_the_first_error_ends_the_others() -> None:
    async def twice(value: int) -> int:
        await asyncio.sleep(0.001 * (3 - value))
        return 2 * value

    async def odd(value: int) -> int:
        if value == 1:
            raise ValueError("odd")
        await lasts()
        return value

    assert await gather_first(twice, [1, 2, 3], 2) == [2, 4, 6]
    assert await gather_first(twice, [], 2) == []
    with pytest.raises(ValueError, match="odd"):
        await gather_first(odd, [0, 1, 2], 3)


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


async def test_a_run_that_has_just_ended_is_not_joined() -> None:
    """It is removed one iteration of the loop later; a caller that tries again must not spin."""
    flights, ends = Flights[str, int](), asyncio.Event()

    async def first() -> int:
        await asyncio.sleep(0)
        ends.set()  # the other task goes on before the callbacks of this run's end
        return 1

    async def second() -> int:
        return 2

    async def join_at_the_end() -> int:
        await ends.wait()
        assert "k" not in flights
        return await flights.join("k", second)

    joining = asyncio.create_task(join_at_the_end())
    assert await flights.join("k", first) == 1
    assert await joining == 2


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
