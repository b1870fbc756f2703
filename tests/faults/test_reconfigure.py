"""SIGHUP with a changed configuration file under load. Row 63, with real processes."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest
from aiohttp import web

from tests.requests import image, request, text
from tests.support.clients import ALICE
from tests.support.configured import Proxy, instances, proxy
from tests.support.fake_instance import STREAM, decodes, encodes, prefills
from tests.support.fleet import until
from tests.support.registration import ADMIN
from tests.support.reloading import everywhere, gauge
from tests.support.workers import START_S

CLIENTS = 6
OUTLIVED = "conversations are kept for longer than decode instances keep their blocks by default"

pytestmark = [pytest.mark.full, pytest.mark.fault(63)]
one_and_two = pytest.mark.parametrize("workers", [1, 2])


@dataclass
class Load:
    """Clients that send requests continuously."""

    proxy: Proxy
    statuses: list[int] = field(default_factory=list)
    _done: bool = False

    async def __aenter__(self) -> Self:
        self._clients = [asyncio.create_task(self._ask()) for _ in range(CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._done = True
        await asyncio.gather(*self._clients)

    async def _ask(self) -> None:
        while not self._done:
            async with aiohttp.ClientSession() as http:
                for _ in range(5):
                    self.statuses.append(await self.proxy.chat(http))

    async def more(self, count: int = 40) -> None:
        """Wait for `count` further requests."""
        until_now = len(self.statuses)
        await until(lambda: len(self.statuses) >= until_now + count, 60)


@one_and_two
async def test_instances_come_and_go_and_no_request_fails(workers: int, tmp_path: Path) -> None:
    go = asyncio.Event()

    async def streams(web_request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            return await decodes(web_request, body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(web_request)
        await response.write(STREAM[0])
        await go.wait()
        for event in STREAM[1:]:
            await response.write(event)
        return response

    async with instances(encodes, encodes, streams, decodes) as (e1, e2, d1, d2):
        before = {"encode_servers_urls": [e1.url], "decode_servers_urls": [d1.url]}
        after = {"encode_servers_urls": [e2.url], "decode_servers_urls": [d2.url]}
        async with proxy(tmp_path, workers, **before) as running, aiohttp.ClientSession() as http:
            body = request(text(), stream=True)
            async with http.post(f"{running.url}/v1/chat/completions", json=body) as stream:
                assert await stream.content.readuntil(b"\n\n") == STREAM[0]
                async with Load(running) as load:
                    await load.more()
                    lines = await running.reload(**after)
                    await until(lambda: d1.open == 1)  # the stream
                    await load.more()
                    old, new = len(d1.calls), len(d2.calls)
                    await load.more()
                    assert len(d1.calls) == old
                    assert len(d2.calls) > new
                    await running.reload(**before)
                    await load.more()
                    await running.reload(**after)
                go.set()
                assert await stream.read() == b"".join(STREAM[1:])

    assert set(load.statuses) == {200}
    assert lines[0]["changed"] == ["decode_servers_urls", "encode_servers_urls"]
    assert e2.calls


@one_and_two
async def test_limits_and_policies_change_under_load(workers: int, tmp_path: Path) -> None:
    async with instances(encodes, decodes) as (e, d):
        urls = {"encode_servers_urls": [e.url], "decode_servers_urls": [d.url]}
        two = (image(b"1"), image(b"2"))
        async with proxy(tmp_path, workers, **urls) as running, Load(running) as load:
            assert await running.statuses(*two) == {200}
            await running.reload(**urls, max_items=1, encode_balance="least_load")
            assert await running.statuses(*two) == {400}
            await running.reload(
                **urls, max_body_bytes=2000, max_requests=64, connect_timeout_s=9, keep_alive_s=5
            )
            assert await running.statuses(*two) == {200}
            assert await running.statuses(text("a" * 2000)) == {413}
            await running.reload(**urls, on_encode_failure="fail", media_fetch="proxy")
            assert await running.statuses(image("http://127.0.0.1/x.png")) == {400}

    assert set(load.statuses) == {200}


@one_and_two
async def test_a_reload_changes_balance_and_conversations_but_not_their_stores(
    workers: int, tmp_path: Path
) -> None:
    asked: list[str] = []
    async with instances(encodes, decodes, decodes) as (e, first, second):
        for one in (first, second):
            one.metrics = counted(asked, one.url)
        urls = {"encode_servers_urls": [e.url], "decode_servers_urls": [first.url, second.url]}
        async with proxy(tmp_path, workers, **urls, load_interval_s=600) as running:
            await until(lambda: sorted(asked) == sorted(workers * [first.url, second.url]))
            new = {"load_interval_s": 0.05, "instance_weights": [f"{first.url}=0"]}
            lines = await running.reload(
                **urls, **new, conversation_store="redis://nowhere", conversation_ttl=9
            )
            await until(lambda: len(asked) > 10 * workers)
            before = len(first.calls)
            assert await running.statuses(text()) == {200}
            assert len(first.calls) == before
            await running.reload(**urls, load_interval_s=0, decode_balance="round_robin")
            assert await running.statuses(text()) == {200}
            assert len(first.calls) > before

    changed = ["conversation_ttl", "instance_weights", "load_interval_s"]
    assert [line["changed"] for line in lines] == [changed] * workers
    needed = running.logged("needs a restart", level="warning")
    assert [line["settings"] for line in needed] == [["conversation_store"]] * workers


@one_and_two
async def test_conversations_that_come_to_outlive_decodes_blocks_are_warned_of(
    workers: int, tmp_path: Path
) -> None:
    async with instances(encodes, decodes) as (e, d):
        urls = {"encode_servers_urls": [e.url], "decode_servers_urls": [d.url]}
        async with proxy(tmp_path, workers, **urls) as running:
            for ttl_s, more in ((474, {}), (475, {}), (475, {"max_items": 3}), (9, {}), (900, {})):
                await running.reload(**urls, conversation_ttl=ttl_s, **more)

    warned = running.logged(OUTLIVED, level="warning")
    assert sorted(line["conversation_ttl"] for line in warned) == [475] * workers + [900] * workers


def counted(asked: list[str], url: str) -> Callable[[], Awaitable[web.Response]]:
    """Return a metrics page without load that records the URL for which it was scraped."""

    async def metrics() -> web.Response:
        asked.append(url)
        return web.Response(text="vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n")

    return metrics


@one_and_two
async def test_a_wrong_file_changes_nothing_and_all_its_errors_are_logged(
    workers: int, tmp_path: Path
) -> None:
    async with instances(encodes, decodes) as (e, d):
        urls = {"encode_servers_urls": [e.url], "decode_servers_urls": [d.url]}
        async with proxy(tmp_path, workers, **urls, max_items=1) as running:
            lines = await running.reload("not reloaded", **urls, max_itemz=3, max_queue="x")
            assert await running.statuses(image(), image(b"2")) == {400}
            assert await everywhere(lambda: gauge(running.url, ALICE)) == {0}

            running.file.unlink()
            await running.hangs_up("not reloaded")
            assert await running.statuses() == {200}

            await running.reload(**urls, max_items=2)
            assert await running.statuses(image(), image(b"2")) == {200}
            async with asyncio.timeout(START_S):
                while await everywhere(lambda: gauge(running.url, ALICE)) != {1}:
                    pass  # the values of another worker are up to a second old

    assert len(lines) == workers
    assert {line["level"] for line in lines} == {"error"}
    assert "epd.yaml:1: max_itemz is unknown; is max_items meant?" in lines[0]["reason"]
    assert "epd.yaml:1: max_queue should be a valid integer" in lines[0]["reason"]


@one_and_two
async def test_settings_that_need_a_restart_are_named_and_kept(
    workers: int, tmp_path: Path
) -> None:
    async with instances(encodes, decodes) as (e, d):
        urls = {"encode_servers_urls": [e.url], "decode_servers_urls": [d.url]}
        async with proxy(tmp_path, workers, **urls) as running:
            [line, *_] = await running.reload(
                **urls, ec_store="redis://nowhere", isolation="shared", max_items=1
            )
            assert line["changed"] == ["max_items"]
            assert await running.statuses() == {200}
            [refused, *_] = await running.reload(
                "not reloaded", **urls, api_keys_file="/nowhere", tenant_max_requests=1
            )

    needed = running.logged("needs a restart", level="warning")
    assert len(needed) == workers
    assert needed[0]["settings"] == ["ec_store", "isolation"]
    assert refused["reason"] == (
        "api_keys_file cannot change without a restart, and with the old value "
        "--tenant-max-requests needs --api-keys-file"
    )


@one_and_two
async def test_a_reload_adds_and_removes_the_prefill_stage(workers: int, tmp_path: Path) -> None:
    async with instances(encodes, prefills, decodes) as (e, p, d):
        urls = {"encode_servers_urls": [e.url], "decode_servers_urls": [d.url]}
        async with proxy(tmp_path, workers, **urls) as running:
            assert await running.statuses() == {200}
            assert not p.calls

            await running.reload(**urls, prefill_servers_urls=p.url)
            assert await running.statuses() == {200}
            prefilled = len(p.calls)

            await running.reload(**urls)
            assert await running.statuses() == {200}

    assert prefilled
    assert len(p.calls) == prefilled
    assert sum("kv_transfer_params" in call.body for call in d.calls) == prefilled


@one_and_two
async def test_flags_go_before_the_file_at_a_reload_too(workers: int, tmp_path: Path) -> None:
    async with instances(encodes, decodes) as (e, d):
        urls = {"encode_servers_urls": [e.url], "decode_servers_urls": [d.url]}
        async with proxy(tmp_path, workers, "--max-items", "1", **urls) as running:
            await running.reload(**urls, max_items=9, log_level="debug")
            assert await running.statuses(image(), image(b"2")) == {400}
            assert await running.statuses() == {200}
            await until(lambda: running.logged("stage"))


async def test_a_secret_file_is_reloaded(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-SECRET-one")
    async with instances(encodes, decodes) as (e, d):
        urls = {"encode_servers_urls": [e.url], "decode_servers_urls": [d.url]}
        async with proxy(tmp_path, 1, **urls, openai_api_key_file=str(key)) as running:
            await running.statuses()
            key.write_text("sk-SECRET-two")
            [line] = await running.hangs_up("reloaded")
            await running.statuses()

    assert d.calls[0].headers["Authorization"] == "Bearer sk-SECRET-one"
    assert d.calls[-1].headers["Authorization"] == "Bearer sk-SECRET-two"
    assert line["changed"] == ["openai_api_key"]
    assert "SECRET" not in str(running.lines)


async def test_a_replaced_worker_has_the_configuration_in_force(tmp_path: Path) -> None:
    async with instances(encodes, decodes) as (e, d):
        urls = {"encode_servers_urls": [e.url], "decode_servers_urls": [d.url]}
        async with proxy(tmp_path, 2, **urls) as running:
            await running.reload(**urls, max_items=1)
            await running.reload("not reloaded", **urls, max_itemz=1)
            for pid in running.pids():
                os.kill(pid, signal.SIGKILL)
            await until(lambda: len(running.pids()) == 4, START_S)
            assert await running.statuses(image(), image(b"2")) == {400}
            assert await running.statuses() == {200}


@one_and_two
async def test_registered_instances_outlast_reloads_even_of_a_file_that_forgets_registration(
    workers: int, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text(ADMIN["X-API-Key"])
    async with instances(encodes, decodes) as (e, d):
        urls = {"decode_servers_urls": [d.url], "admin_api_key_file": str(key)}
        async with (
            proxy(tmp_path, workers, **urls, dynamic_registration=True) as running,
            aiohttp.ClientSession(headers=ADMIN) as http,
        ):
            entry = {"role": "encode", "url": e.url}
            async with http.post(f"{running.url}/instances", json=entry) as reply:
                assert await reply.json() == {"registered": True}

            for items in (1, 2):
                await running.reload(**urls, encode_servers_urls=[e.url], max_items=items)
                two = {200} if items > 1 else {400}
                assert await running.statuses(image(), image(b"2")) == two
            await running.reload(**urls, dynamic_registration=True, max_items=3)
            async with http.get(f"{running.url}/instances") as reply:
                sources = {one["url"]: one["sources"] for one in (await reply.json())["instances"]}

    assert sources == {d.url: ["config"], e.url: ["api"]}
    needed = running.logged("needs a restart", level="warning")
    assert {tuple(line["settings"]) for line in needed} == {("dynamic_registration",)}
