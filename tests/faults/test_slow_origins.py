"""Row 84: origins of media that do not answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from epd.media.slots import REQUEST_SLOTS, TENANT_SLOTS
from tests.requests import image, request
from tests.support.fake_origin import ALLOWED, FakeOrigin
from tests.support.fleet import Launch, until

pytestmark = pytest.mark.fault(84)


class Silent(asyncio.Protocol):
    """Server that accepts connections and sends nothing."""

    def __init__(self, connections: list["Silent"]) -> None:
        connections.append(self)


@asynccontextmanager
async def silent(connections: list[Silent]) -> AsyncIterator[str]:
    loop = asyncio.get_running_loop()
    async with await loop.create_server(lambda: Silent(connections), "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_request_with_silent_origins_leaves_slots_for_others(launch: Launch) -> None:
    connections: list[Silent] = []
    async with (
        silent(connections) as one,
        silent(connections) as other,
        FakeOrigin().running() as origin,
        launch(**ALLOWED) as fleet,
    ):
        urls = [f"{url}/{number}" for number in range(16) for url in (one, other)]
        slow = asyncio.create_task(fleet.chat(request(*map(image, urls))))
        await until(lambda: len(connections) == REQUEST_SLOTS)

        assert (await fleet.chat(request(image(origin.url))))[0] == 200
        assert not slow.done()
        assert len(connections) == REQUEST_SLOTS
        assert (await slow)[0] == 422


@pytest.mark.fault(100)
async def test_a_request_that_gets_no_slot_in_time_is_told_to_come_later(
    launch: Launch,
) -> None:
    connections: list[Silent] = []
    async with silent(connections) as url, launch(media_timeout_s=0.3, **ALLOWED) as fleet:
        asked = [
            asyncio.create_task(fleet.chat(request(image(f"{url}/{number}"))))
            for number in range(2 * TENANT_SLOTS + 1)
        ]
        answers = [await one for one in asked]

    # The first may be silent for as long as the others wait.
    refused = [answer["error"] for status, answer in answers if status == 503]
    assert {status for status, _ in answers} == {422, 503}
    assert {error["type"] for error in refused} == {"ServiceUnavailableError"}
    assert all(error["param"].startswith("messages[0]") for error in refused)
