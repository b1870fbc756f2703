"""The checks after each fault can fail."""

import asyncio
from typing import Any

import pytest

from epd.errors import ProxyError
from epd.server import api_routes
from tests.requests import request, text
from tests.support.fake_instance import hangs
from tests.support.fleet import Fleet, Launch, until
from tests.support.invariants import WatchedLaunch


@pytest.fixture
def launch() -> Launch:
    return WatchedLaunch(grace_s=0.2)


async def test_open_upstream_requests_are_detected(launch: Launch) -> None:
    with pytest.raises(AssertionError, match="http://127"):  # noqa: PT012
        async with launch() as fleet:
            fleet.d.chat = hangs
            chat = asyncio.create_task(fleet.chat(request(text())))
            await until(lambda: fleet.d.calls)
    chat.cancel()
    await asyncio.wait([chat])


async def test_a_request_without_an_end_is_noticed(launch: Launch) -> None:
    with pytest.raises(AssertionError):  # noqa: PT012
        async with launch() as fleet:
            await fleet.chat(request(text()))
            fleet.events.requests.clear()


async def test_a_leftover_task_is_detected(launch: Launch) -> None:
    with pytest.raises(AssertionError, match="sleep"):
        async with launch():
            left = asyncio.create_task(asyncio.sleep(60))
    left.cancel()


async def test_a_leftover_file_is_detected(launch: Launch) -> None:
    with pytest.raises(AssertionError):
        async with launch():
            left = open(__file__, "rb")  # noqa: SIM115, ASYNC230, PTH123
    left.close()


async def test_an_error_in_another_shape_is_noticed(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProxyError, "body", lambda _: b'{"detail": "no"}')
    async with launch() as fleet:
        with pytest.raises(AssertionError, match="detail"):
            await fleet.chat(b"{")


async def test_a_bug_is_noticed(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    async def bug(*_: object) -> bytes:
        raise AttributeError("'str' object has no attribute 'get'")

    async def chat(fleet: Fleet) -> Any:
        with pytest.raises(AssertionError, match="the proxy failed"):
            await fleet.chat(request(text()))

    monkeypatch.setattr(api_routes, "read_request", bug)
    with pytest.raises(AssertionError, match="internal_error"):
        async with launch() as fleet:
            await chat(fleet)
