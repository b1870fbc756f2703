"""`StrictTaskGroup`: a failing child leaves no pending cancellation of the parent task."""

import asyncio
import time

import pytest

from epd.aio import StrictTaskGroup, gather_first
from epd.edge.drain import Drain
from epd.errors import Overloaded, UpstreamTimeout


async def fails() -> None:
    await asyncio.sleep(0)
    raise ValueError("failed")


async def lasts() -> None:
    await asyncio.sleep(60)


async def fails_together() -> None:
    """Let one of two tasks fail while the group waits for both, as a failed attempt does."""
    try:
        async with StrictTaskGroup() as group:
            await asyncio.wait([group.create_task(one) for one in (fails(), lasts())])
    except ExceptionGroup:
        return
    raise AssertionError("nothing failed")


async def test_a_failure_leaves_no_cancellation_behind() -> None:
    await fails_together()

    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.parametrize("cut", [False, True])
async def test_after_a_failure_the_time_of_a_request_still_ends_in_its_own_error(cut: bool) -> None:
    drain = Drain()

    async def request() -> None:
        with drain.bound_request(time.monotonic() + (60 if cut else 0.05)):
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
        try:
            async with StrictTaskGroup() as group:
                both = (leaves_and_fails(), lasts())
                await asyncio.wait([group.create_task(one) for one in both])
        except ExceptionGroup:
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
