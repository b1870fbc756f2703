"""Depth of the call stack from a request's handler to the write to an instance's socket.

Counted over the chain of tasks: a task adds the frames of the call that created it.
"""

import asyncio
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest

import epd
from epd.http.connection import Connection
from tests.requests import image, request, text
from tests.support.fleet import Launch

OURS = str(Path(epd.__file__).parent)
HANDLER = "answer_request"
MOST = {"encode": 15, "prefill": 9, "decode": 8}
"""Maximum number of frames from the handler to the write to the instance's socket, both
included."""


class Depths:
    """Frames of this package above each request to an instance, by the first caller of the path."""

    def __init__(self) -> None:
        self.of: dict[str, list[str]] = {}
        self._made_in: WeakKeyDictionary[asyncio.Task[Any], list[str]] = WeakKeyDictionary()

    def frames(self) -> list[str]:
        """Return the names of the functions from the handler to the caller of this method."""
        names, frame = list[str](), sys._getframe(2)  # noqa: SLF001 - there is no other way
        while frame is not None:
            if frame.f_code.co_filename.startswith(OURS):
                name = frame.f_code.co_qualname
                if not name.endswith("<listcomp>"):  # not a frame since Python 3.12
                    names.append(name)
                if name == HANDLER:
                    return names
            frame = frame.f_back  # type: ignore[assignment]
        task = asyncio.current_task()
        return names + (self._made_in.get(task, []) if task is not None else [])

    def make_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any
    ) -> asyncio.Task[Any]:
        """Create a task, and record the frames that created it."""
        task = asyncio.Task(coroutine, loop=loop, **more)
        with suppress(RuntimeError):  # created outside of any task
            self._made_in[task] = self.frames()
        return task


@pytest.fixture
def depths(monkeypatch: pytest.MonkeyPatch) -> Depths:
    depths, ask = Depths(), Connection.send_request

    async def asked(self: Connection, *args: Any) -> None:
        names = depths.frames()
        if HANDLER in names:
            [stage] = {name for name in names if re.match(r"Stages\.[a-z]", name)}
            depths.of[stage.removeprefix("Stages.")] = [*names, "Connection.ask"]
        await ask(self, *args)

    monkeypatch.setattr(Connection, "send_request", asked)
    return depths


@pytest.mark.parametrize("pictures", [1, 2])
@pytest.mark.parametrize("prefills", [0, 1])
async def test_each_stage_is_near_the_handler(
    launch: Launch, depths: Depths, url: str, prefills: int, pictures: int
) -> None:
    asyncio.get_running_loop().set_task_factory(depths.make_task)
    more: dict[str, Any] = {"ec_store": url} if prefills else {}
    images = [image(b"%d" % number) for number in range(pictures)]
    async with launch(prefill=prefills, **more) as fleet:
        status, _ = await fleet.chat(request(*images, text()))

    assert status == 200
    assert set(depths.of) == {"encode", "decode", *(["prefill"] if prefills else [])}
    assert {stage: names for stage, names in depths.of.items() if len(names) > MOST[stage]} == {}
