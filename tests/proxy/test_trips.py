"""Size of a request's path: the files, functions and types of this project that it visits.

`pytest -s` prints them. A figure may fall, and then its limit falls with it.
"""

import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest

import ec_store
import epd
from epd.aio import Background
from tests.proxy.test_servers import serving
from tests.requests import image, png, request, text
from tests.support.backed import Backed, Both, caching
from tests.support.fleet import Fleet, Launch

OURS = tuple(str(Path(package.__file__ or "").parent) for package in (epd, ec_store))
MEASURED = 10
"""Number of measured requests. What not all of them visit belongs to the background."""
BACKGROUND = Background.keep_running.__code__
"""What a chore runs belongs to the background even if it runs during every measured request."""


OFF = {
    "epd/api/usage.py",
    "epd/conversations",
    "epd/edge/tenant_use.py",
    "epd/encoder_cache",
    "epd/kv_events",
    "epd/media",
    "epd/request/encode",
    "epd/request/kv_peers.py",
    "epd/request/kv_readback.py",
    "epd/request/prefix.py",
    "epd/request/request_media.py",
    "epd/routing/store_access.py",
    "epd/transfer/ec.py",
    "epd/transfer/kv.py",
}
"""Beginnings of the paths of features that a text request does not use."""


class Trip(NamedTuple):
    """Numbers of what a request visits."""

    files: int
    functions: int
    types: int


class Visits:
    """Functions and types of this project that run on the event loop."""

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()
        self.types: set[type] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if (
            event == "call"
            and frame.f_code.co_filename.startswith(OURS)
            and not in_background(frame)
        ):
            self.functions.add(frame.f_code)
            owner = frame.f_locals.get("self", frame.f_locals.get("cls"))
            if owner is not None:
                self.types.add(owner if inspect.isclass(owner) else type(owner))


def in_background(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not BACKGROUND:
        frame = frame.f_back
    return frame is not None


async def visited(ask: Callable[[int], Awaitable[object]]) -> tuple[set[CodeType], set[type]]:
    """Return what each of several equal requests visits, after two that are not measured."""
    for number in range(2):
        await ask(number)
    every = []
    for number in range(2, 2 + MEASURED):
        visits = Visits()
        sys.setprofile(visits)
        try:
            await ask(number)
        finally:
            sys.setprofile(None)
        every.append(visits)
    functions = set.intersection(*(visits.functions for visits in every))
    types = set.intersection(*(visits.types for visits in every))
    ours = {kind for kind in types if kind.__module__.startswith(("epd.", "ec_store."))}
    return functions, ours


@asynccontextmanager
async def text_e_pd(launch: Launch, _: Backed, __: str) -> AsyncIterator[Callable[[int], Any]]:
    async with launch() as fleet:
        yield lambda number: answered(fleet, request(text(str(number))))


@asynccontextmanager
async def picture_e_p_d(
    launch: Launch, backed: Backed, url: str
) -> AsyncIterator[Callable[[int], Any]]:
    async with caching(launch, backed, url, prefill=1) as fleet:
        yield lambda number: answered(fleet, request(image(b"%d" % number), stream=True))


@asynccontextmanager
async def picture_hit(
    launch: Launch, backed: Backed, url: str
) -> AsyncIterator[Callable[[int], Any]]:
    async with caching(launch, backed, url, prefill=1) as fleet:
        yield lambda _: answered(fleet, request(image(b"same"), stream=True))


async def answered(fleet: Fleet, body: dict[str, Any]) -> None:
    async with fleet.post(body) as reply:
        assert reply.status == 200, await reply.text()
        await reply.read()


@pytest.mark.parametrize(
    ("start", "most"),
    [
        (text_e_pd, Trip(49, 226, 48)),
        (picture_e_p_d, Trip(78, 461, 77)),
        (picture_hit, Trip(73, 381, 69)),
    ],
)
async def test_no_trip_grows(
    launch: Launch, backed: Backed, url: str, start: Any, most: Trip
) -> None:
    async with start(launch, backed, url) as ask:
        await check_trip(start.__name__, ask, most)


async def test_no_trip_grows_with_servers_that_encode(launch: Launch, both: Both, url: str) -> None:
    async with serving(launch, both, url, servers=1) as fleet:

        async def ask(number: int) -> None:
            await answered(fleet, request(image(png(100, 100 + number)), stream=True))

        await check_trip("picture_1epd", ask, Trip(69, 378, 72))


async def check_trip(name: str, ask: Callable[[int], Awaitable[object]], most: Trip) -> None:
    functions, types = await visited(ask)
    files = {code.co_filename for code in functions}
    found = Trip(len(files), len(functions), len(types))

    print(f"\n{name}: {found}")  # noqa: T201 - the figures are what it is for
    assert all(now <= limit for now, limit in zip(found, most, strict=True)), (found, most)


async def test_a_text_request_visits_nothing_that_is_off(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with text_e_pd(launch, backed, url) as ask:
        functions, _ = await visited(ask)
    root = Path(epd.__file__ or "").parents[1]
    files = {str(Path(code.co_filename).relative_to(root)) for code in functions}
    product = [str(path.relative_to(root)) for path in root.glob("epd/**/*")]

    assert all(any(path.startswith(name) for path in product) for name in OFF)
    assert not {path for path in files if path.startswith(tuple(OFF))}
