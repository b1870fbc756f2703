"""`Drain`: running requests end by themselves, or are cancelled."""

import asyncio
import time

import pytest

from epd.edge.drain import Bounded, Drain
from epd.errors import Overloaded, UpstreamTimeout


async def runs(drain: Drain, seconds: float = 60) -> str:
    with Bounded(drain):
        await asyncio.sleep(seconds)
    return "ended"


async def test_idle_waits_for_the_last_request() -> None:
    drain = Drain()
    await drain.idle()
    first, second = asyncio.create_task(runs(drain, 0.01)), asyncio.create_task(runs(drain, 0.05))
    await asyncio.sleep(0)
    await drain.idle()

    assert (await first, await second) == ("ended", "ended")


async def test_the_cut_off_ends_running_and_later_requests() -> None:
    drain = Drain()
    early = asyncio.create_task(runs(drain))
    await asyncio.sleep(0)
    drain.cut_off()
    late = asyncio.create_task(runs(drain))

    for task in (early, late):
        with pytest.raises(Overloaded) as raised:
            await task
        assert (raised.value.status, raised.value.slug) == (503, "shutting_down")
    async with asyncio.timeout(60):
        await drain.idle()


async def test_a_request_aborted_by_the_drain_may_send_a_last_event() -> None:
    drain = Drain()
    said = []

    async def streams() -> None:
        try:
            await runs(drain)
        except Overloaded:
            await asyncio.sleep(0.01)
            said.append("sorry")

    task = asyncio.create_task(streams())
    await asyncio.sleep(0)
    drain.cut_off()
    await task

    assert said == ["sorry"]


async def test_a_request_ends_when_its_own_time_has_passed() -> None:
    drain = Drain()
    now_s = time.monotonic()
    with pytest.raises(UpstreamTimeout) as raised, Bounded(drain, now_s + 0.01):
        await asyncio.sleep(60)

    assert (raised.value.status, raised.value.slug) == (504, "request_timeout")
    with Bounded(drain, now_s + 60):
        await asyncio.sleep(0)
    assert not drain.running


async def test_the_end_of_the_application_comes_before_a_request_s_own() -> None:
    drain = Drain()

    async def long() -> None:
        with Bounded(drain, time.monotonic() + 60):
            await asyncio.sleep(60)

    task = asyncio.create_task(long())
    await asyncio.sleep(0)
    drain.cut_off()

    with pytest.raises(Overloaded):
        await task


async def test_drain_does_not_change_other_endings() -> None:
    drain = Drain()
    cancelled = asyncio.create_task(runs(drain))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled

    with pytest.raises(TimeoutError), Bounded(drain):
        async with asyncio.timeout(0):
            await asyncio.sleep(60)
    async with asyncio.timeout(60):
        await drain.idle()


async def test_a_client_that_disconnects_at_the_deadline_gets_no_answer() -> None:
    drain = Drain()
    task = asyncio.create_task(runs(drain))
    await asyncio.sleep(0)
    drain.cut_off()
    asyncio.get_running_loop().call_soon(task.cancel)  # in the same iteration of the loop

    with pytest.raises(asyncio.CancelledError):
        await task
    assert not drain.running


async def test_requests_end_in_the_order_of_their_deadlines() -> None:
    drain = Drain()
    now_s = time.monotonic()
    ended: list[str] = []

    async def takes(name: str, until_s: float) -> None:
        try:
            with Bounded(drain, until_s):
                await asyncio.sleep(60)
        except UpstreamTimeout:
            ended.append(name)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for name, seconds in (("third", 0.3), ("first", 0.05), ("second", 0.15)):
            group.create_task(takes(name, now_s + seconds))

    assert ended == ["first", "second", "third"]


async def test_a_request_that_sends_its_last_event_is_not_cut_off_twice() -> None:
    drain = Drain()
    cut = asyncio.Event()

    async def streams() -> str:
        with Bounded(drain, time.monotonic() + 0.01):
            try:
                await asyncio.sleep(60)
            finally:
                await cut.wait()
        return "ended"

    task = asyncio.create_task(streams())
    await asyncio.sleep(0.05)
    drain.cut_off()
    cut.set()

    with pytest.raises(Overloaded):
        await task
