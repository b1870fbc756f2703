"""Turns of requests in quarantine."""

import asyncio

import pytest

from epd.errors import SuspectedFatal, UpstreamDied
from epd.request.quarantine import MAX_WAITING, Quarantine
from epd.routing.fatal import MAX_TENANT_DEATHS, SAME_DEATH_S, FatalRequests, Watched
from epd.routing.instances import Instance, Role
from tests.support.clock import Clock

D = Instance(Role.DECODE, "http://d:1")
POISON = 1


def after_deaths() -> tuple[FatalRequests, Quarantine]:
    """Return a ledger with enough deaths for a quarantine."""
    clock = Clock()
    fatal = FatalRequests(300.0, lambda _: False, clock)
    for number in range(MAX_TENANT_DEATHS):
        clock.now_s += 2 * SAME_DEATH_S
        watched = Watched("t", f"body {number}", kind=POISON)
        fatal.count_death(UpstreamDied("it broke", stage="decode"), D, watched)
    return fatal, Quarantine(fatal)


async def serve(quarantine: Quarantine, go_on: asyncio.Event, served: list[Watched]) -> None:
    watched = Watched("t", "b", kind=POISON)
    async with quarantine.context_for(watched):
        served.append(watched)
        await go_on.wait()


async def test_a_tenants_requests_that_wait_in_quarantine_are_bounded() -> None:
    _, quarantine = after_deaths()
    go_on, served = asyncio.Event(), list[Watched]()
    running = [
        asyncio.create_task(serve(quarantine, go_on, served)) for _ in range(MAX_WAITING + 1)
    ]
    await asyncio.sleep(0)
    with pytest.raises(SuspectedFatal):
        await serve(quarantine, go_on, served)
    assert len(served) == 1

    running.pop().cancel()  # a client disconnects
    await asyncio.sleep(0)
    running.append(asyncio.create_task(serve(quarantine, go_on, served)))
    go_on.set()
    await asyncio.gather(*running)
    assert [watched.most_deaths for watched in served] == [1] * (MAX_WAITING + 1)


async def test_waiting_requests_go_on_together_once_their_kind_is_proven() -> None:
    fatal, quarantine = after_deaths()
    go_on, served = asyncio.Event(), list[Watched]()
    running = [asyncio.create_task(serve(quarantine, go_on, served)) for _ in range(5)]
    await asyncio.sleep(0)
    for _ in range(100):
        fatal.record_survival(Watched("t", "b", kind=POISON))
    running[0].cancel()
    for _ in range(20):
        await asyncio.sleep(0)

    assert len(served) == 5
    assert [watched.pins for watched in served[1:]] == [None] * 4
    go_on.set()
    await asyncio.gather(*running[1:])
