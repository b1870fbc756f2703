"""Logs of `epd serve` for failing requests: request id, failed instance, consequence."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ec_store import open_store
from ec_store.opening import open_async_store
from epd.aio import Background
from epd.encoder_cache.client import EncoderCache
from epd.observe.logs import REQUEST_ID
from tests.requests import image, request, text
from tests.support.backed import cache_settings
from tests.support.fake_instance import (
    FakeInstance,
    Handler,
    decodes,
    encodes,
    hangs,
    prefills,
    refuses,
)
from tests.support.fleet import until
from tests.support.programs import serving

FAILURE_S = 30.0
USUAL: dict[str, Handler] = {"encode": encodes, "prefill": prefills, "decode": decodes}


@dataclass
class Running:
    """Proxy at level debug with one instance of each role, and its log."""

    url: str
    process: subprocess.Popen[str]
    instances: dict[str, FakeInstance]
    lines: list[dict[str, Any]]

    async def ask(self, request_id: str, **more: Any) -> int:
        body = request(image(request_id.encode()), text(), **more)
        async with (
            aiohttp.ClientSession(headers={"x-request-id": request_id}) as http,
            http.post(f"{self.url}/v1/chat/completions", json=body) as reply,
        ):
            await reply.read()
            return reply.status

    async def read(self) -> None:
        assert self.process.stderr is not None
        while line := await asyncio.to_thread(self.process.stderr.readline):
            self.lines.append(json.loads(line))

    async def logged(self, event: str, **fields: object) -> dict[str, Any]:
        """Wait for the line with this event and these fields, and return it."""
        await until(lambda: self._lines(event, fields), FAILURE_S)
        [line] = self._lines(event, fields)
        return line

    def _lines(self, event: str, fields: dict[str, object]) -> list[dict[str, Any]]:
        wanted = {"event": event, **fields}
        return [line for line in self.lines if wanted.items() <= line.items()]


@asynccontextmanager
async def proxy(*flags: str, **misdeeds: Handler) -> AsyncIterator[Running]:
    instances = {role: FakeInstance(misdeeds.get(role, chat)) for role, chat in USUAL.items()}
    async with AsyncExitStack() as stack:
        for instance in instances.values():
            await stack.enter_async_context(instance.running())
        urls = [f"--{role}-servers-urls={one.url}" for role, one in instances.items()]
        lines: list[dict[str, Any]] = []
        with serving(*urls, "--log-level", "debug", *flags, lines=lines) as (url, process):
            running = Running(url, process, instances, lines)
            reading = asyncio.create_task(running.read())
            try:
                yield running
            finally:
                process.kill()
                await reading


@pytest.mark.parametrize("role", ["encode", "prefill"])
async def test_a_failed_instance_is_logged_with_the_consequence(role: str) -> None:
    flags = () if role == "encode" else ("--on-prefill-failure", "local")
    async with proxy(*flags, **{role: refuses(500)}) as running:
        status = await running.ask("r-1")
        line = await running.logged("request", request_id="r-1")
        stages = [one for one in running.lines if one["event"] == "stage"]

    assert (status, line["status"], line["level"]) == (200, 200, "warning")
    failure = f"{role}@{running.instances[role].url}={role}_failed"
    assert set(line["failures"].split(",")) == {failure}
    assert line["degraded"] == f"{role}-local"
    assert {one["request_id"] for one in stages} == {"r-1"}
    assert {one["error"] for one in stages if one["stage"] == role} == {f"{role}_failed"}


async def test_concurrent_failures_are_logged_by_request() -> None:
    async with proxy(decode=refuses(500)) as running:
        names = [f"r-{number}" for number in range(8)]
        await asyncio.gather(*(running.ask(name) for name in names))
        for name in names:
            line = await running.logged("request", request_id=name)
            assert "decode@" in line["failures"]
            stages = [
                one["stage"]
                for one in running.lines
                if one["event"] == "stage" and one["request_id"] == name
            ]
            assert {"encode", "prefill", "decode"} <= set(stages)


async def test_a_failed_release_of_blocks_is_a_warning_of_the_request() -> None:
    async with proxy(decode=hangs) as running:
        asking = asyncio.create_task(running.ask("r-1"))
        decode = running.instances["decode"]
        await until(lambda: decode.calls, FAILURE_S)
        decode.chat = refuses(503)
        asking.cancel()
        line = await running.logged("stage", stage="release")

    assert (line["request_id"], line["level"], line["error"], line["instance"]) == (
        "r-1",
        "warning",
        "release_failed",
        decode.url,
    )
    assert "lease" in line["next"]


async def test_a_lost_store_is_logged_with_its_consequence(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    open_store(folder.as_uri()).close()
    async with proxy("--ec-store", folder.as_uri()) as running:
        await running.ask("r-1")
        folder.rename(tmp_path / "gone")
        folder.write_text("no folder")
        line = await running.logged("the encoder store is unavailable")

    assert "request_id" not in line
    assert "retries every" in line["next"]


async def test_later_work_for_the_store_has_no_request_id() -> None:
    seen: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        seen.set_result(REQUEST_ID.get())

    REQUEST_ID.set("r-1")
    open_store = partial(open_async_store, "file:///nowhere")
    cache = EncoderCache(open_store, cache_settings(lease_s=1), Background(lambda *_: None))
    cache.run_later(work())

    assert await seen is None


async def test_an_ejected_instance_is_logged_with_its_consequence() -> None:
    async with proxy("--eject-after", "1", decode=refuses(502)) as running:
        await running.ask("r-1")
        line = await running.logged("instance ejected", state="ejected")

    assert (line["request_id"], line["level"]) == ("r-1", "warning")
    assert line["instance"] == running.instances["decode"].url
    assert "trial" in line["next"]
