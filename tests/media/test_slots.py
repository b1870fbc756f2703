"""Slots for downloads."""

import asyncio

import pytest

from epd.errors import Overloaded
from epd.media.slots import SLOTS, TENANT_SLOTS, DownloadSlots


class Downloads:
    """Downloads that end when they are cancelled."""

    def __init__(self) -> None:
        self.slots = DownloadSlots()
        self.running: list[str] = []
        self.tasks: dict[str, list[asyncio.Task[None]]] = {}

    async def start(self, tenant: str, number: int) -> None:
        started = [asyncio.create_task(self._download(tenant)) for _ in range(number)]
        self.tasks.setdefault(tenant, []).extend(started)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def end(self, tenant: str) -> None:
        for task in self.tasks[tenant]:
            task.cancel()
        await asyncio.gather(*self.tasks.pop(tenant), return_exceptions=True)

    async def _download(self, tenant: str) -> None:
        async with self.slots.slot(tenant, 3600):
            self.running.append(tenant)
            try:
                await asyncio.sleep(3600)
            finally:
                self.running.remove(tenant)


async def test_a_tenant_gets_half_of_all_slots() -> None:
    downloads = Downloads()
    await downloads.start("a", 2 * SLOTS)
    assert downloads.running == ["a"] * TENANT_SLOTS

    await downloads.start("b", 1)
    assert downloads.running.count("b") == 1

    await downloads.end("a")
    await downloads.start("a", 1)
    assert downloads.running.count("a") == 1
    await downloads.end("a")
    await downloads.end("b")


async def test_all_tenants_together_get_all_slots() -> None:
    downloads = Downloads()
    for tenant in "abc":
        await downloads.start(tenant, SLOTS)
    assert len(downloads.running) == SLOTS

    for tenant in "abc":
        await downloads.end(tenant)
    assert downloads.running == []


@pytest.mark.fault(100)
@pytest.mark.parametrize("busy", ["a", "bc"], ids=["own", "all"])
async def test_a_download_waits_for_a_slot_for_a_limited_time(busy: str) -> None:
    downloads = Downloads()
    for tenant in busy:
        await downloads.start(tenant, TENANT_SLOTS)
    with pytest.raises(Overloaded):
        async with downloads.slots.slot("a", 0.01):
            pytest.fail("there is no slot")

    for tenant in busy:
        await downloads.end(tenant)
    await downloads.start("a", TENANT_SLOTS)
    assert len(downloads.running) == TENANT_SLOTS
    await downloads.end("a")


async def test_the_wait_for_a_slot_does_not_limit_the_download() -> None:
    async with DownloadSlots().slot("a", 0.01):
        await asyncio.sleep(0.05)
