import asyncio

import pytest

from epd.aio import cancel_after


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
