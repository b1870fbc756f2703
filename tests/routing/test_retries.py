"""Retry loop and retry budget."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from epd.errors import (
    BadRequest,
    EncodeMismatch,
    ProxyError,
    UpstreamBusy,
    UpstreamFailed,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from epd.routing import retries
from epd.routing.retries import Retries
from tests.support.fleet import until

T = TypeVar("T")

Again = Callable[[ProxyError], float | None]


async def run(
    budget: Retries, attempt: Callable[[], Awaitable[T]], *, tries: int, again: Again
) -> T:
    """Retry until an attempt succeeds, as the callers of `Retries` do."""
    with budget.tries(tries) as more:
        while True:
            try:
                return await attempt()
            except ProxyError as error:
                if (delay_s := again(error)) is None:
                    raise
                await more.next_try(error, delay_s)


def fails(times: int, calls: list[int]) -> Callable[[], Awaitable[str]]:
    async def attempt() -> str:
        calls.append(len(calls))
        if len(calls) <= times:
            raise UpstreamFailed(f"number {len(calls)}")
        return "done"

    return attempt


def at_once(_: ProxyError) -> float | None:
    return 0.0


async def test_tries_end_with_the_first_success() -> None:
    calls: list[int] = []

    assert await run(Retries(), fails(2, calls), tries=3, again=at_once) == "done"
    assert len(calls) == 3


async def test_the_last_failure_is_raised() -> None:
    calls: list[int] = []

    with pytest.raises(UpstreamFailed, match="number 3"):
        await run(Retries(), fails(9, calls), tries=3, again=at_once)
    assert len(calls) == 3


async def storm(loop: Retries, requests: int) -> tuple[int, int]:
    """Let all requests fail and retry together; return the peak of retries, and the successes."""
    failed, at_once_now, most, served = asyncio.Event(), 0, 0, 0
    waiting = 0

    async def request() -> None:
        nonlocal waiting, at_once_now, most, served
        first = True

        async def attempt() -> None:
            nonlocal first, waiting, at_once_now, most
            if first:
                first = False
                waiting += 1
                if waiting == requests:
                    failed.set()
                await failed.wait()
                raise UpstreamFailed("died")
            at_once_now += 1
            most = max(most, at_once_now)
            await asyncio.sleep(0.01)
            at_once_now -= 1

        await run(loop, attempt, tries=2, again=at_once)
        served += 1

    await asyncio.gather(*[request() for _ in range(requests)])
    return most, served


@pytest.mark.parametrize(("requests", "most"), [(2, 2), (10, 3), (100, 20)])
async def test_few_are_tried_again_at_once_and_all_in_the_end(requests: int, most: int) -> None:
    seen, served = await storm(Retries(), requests)

    assert served == requests
    assert 0 < seen <= most


async def test_a_retry_that_waits_too_long_fails_with_the_first_error() -> None:
    loop, go_on = Retries(patience_s=0.05), asyncio.Event()
    held = 0

    async def holds() -> None:
        nonlocal held
        held += 1
        if held <= retries.LEAST:
            raise UpstreamFailed("first")
        await go_on.wait()

    holders = [
        asyncio.create_task(run(loop, holds, tries=2, again=at_once)) for _ in range(retries.LEAST)
    ]
    await until(lambda: held == 2 * retries.LEAST)
    calls: list[int] = []
    with pytest.raises(UpstreamFailed, match="number 1"):
        await run(loop, fails(1, calls), tries=2, again=at_once)

    go_on.set()
    await asyncio.gather(*holders)
    assert await run(loop, fails(1, []), tries=2, again=at_once) == "done"


async def test_places_of_those_that_are_cancelled_are_free_again() -> None:
    loop = Retries()

    async def hangs() -> None:
        await asyncio.sleep(60)

    for _ in range(3):
        tasks = []
        for _ in range(10):
            calls: list[int] = []

            async def attempt(calls: list[int] = calls) -> None:
                calls.append(1)
                if len(calls) == 1:
                    raise UpstreamFailed("x")
                await hangs()

            tasks.append(asyncio.create_task(run(loop, attempt, tries=2, again=at_once)))
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    assert await run(loop, fails(1, []), tries=2, again=at_once) == "done"


async def test_a_waiter_that_is_cancelled_with_its_place_releases_the_place() -> None:
    budget = Retries()
    for _ in range(retries.LEAST):
        assert await budget.wait_admission()
    waiter = asyncio.create_task(budget.wait_admission())
    await asyncio.sleep(0)
    assert not waiter.done()

    budget.release_place()  # the waiter gets it, and is cancelled before it runs
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter

    assert await budget.wait_admission(0.0)
    assert not await budget.wait_admission(0.0)


@pytest.mark.parametrize(
    ("error", "others", "delay_s"),
    [
        (BadRequest("x"), True, None),
        (UpstreamFailed("x"), True, 0.0),
        (UpstreamFailed("x"), False, 0.0),
        (UpstreamUnreachable("x"), True, 0.0),
        (UpstreamUnreachable("x"), False, None),
        (UpstreamTimeout("x"), True, 0.0),
        (UpstreamTimeout("x"), False, None),
        (UpstreamBusy("x"), True, 0.0),
        (UpstreamBusy("x"), False, None),
        (UpstreamBusy("x", retry_after_s=4.0), True, 0.0),
        (UpstreamBusy("x", retry_after_s=4.0), False, 4.0),
        (UpstreamBusy("x", retry_after_s=6.0), False, None),
        (EncodeMismatch("x"), True, None),
    ],
)
def test_retries_follow_the_class_of_the_error(
    error: ProxyError, others: bool, delay_s: float | None
) -> None:
    assert error.retry_delay_s(others=others, patience_s=5.0) == delay_s
    if delay_s is not None:
        assert error.retryable
