"""`/ui` and `epd top` over HTTP: access, and the state of several workers."""

import asyncio
import json
import os
import pty
import re
import select
import signal
import subprocess
import termios
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDict
from pytest_aiohttp.plugin import AiohttpServer

from ec_store import EntryKey, open_store
from ec_store.aio import AsyncStore
from ec_store.testing.stores import sized
from epd.server.app import RECENT
from epd.server.app_keys import TABLE
from epd.server.operator_routes import METRICS
from epd.server.page_routes import ASSETS, BOARD
from epd.shared_page import Pace, SharedPage
from epd.tenants import key_line
from epd.ui.dashboard import PACE, Board
from tests.ec_store.arena.served import serving
from tests.requests import image, request, text
from tests.support.backed import NAMESPACE, registered
from tests.support.clients import ALICE, bearer
from tests.support.fake_instance import FakeInstance, decodes, encodes, page, refuses
from tests.support.fleet import Fleet, Launch, until
from tests.support.programs import EPD, called
from tests.support.workers import START_S, some_workers

ADMIN = "admin-key-0123456789"


async def asked(fleet: Fleet, path: str, **headers: str) -> tuple[int, CIMultiDict[str], str]:
    async with fleet.http.get(fleet.url + path, headers=headers) as reply:
        return reply.status, CIMultiDict(reply.headers), await reply.text()


async def state_of(url: str, key: str | None = None) -> dict[str, Any]:
    """Return the state that the worker behind a new connection reports."""
    headers = {} if key is None else {"X-API-Key": key}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.get(f"{url}/ui/state") as reply,
    ):
        assert reply.status == 200
        found: dict[str, Any] = await reply.json()
        return found


async def shown(url: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the first state that meets a condition."""
    async with asyncio.timeout(START_S):
        while not condition(state := await state_of(url)):  # noqa: ASYNC110 - it sets no event
            await asyncio.sleep(0.05)
        return state


def ids(state: dict[str, Any]) -> set[str]:
    return {one["id"] for one in state["requests"]}


@pytest.mark.security("S3")
async def test_the_page_contains_no_data_and_the_state_needs_the_operators_key(
    launch: Launch, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(key_line("alice", ALICE))
    keys.chmod(0o600)
    async with launch(admin_api_key=ADMIN, api_keys_file=keys) as fleet:
        for path in ("/ui", *(f"/ui/{name}" for name in ASSETS)):
            status, _, body = await asked(fleet, path)
            assert status == 200
            assert fleet.e.url not in body
        assert (await asked(fleet, "/ui/state"))[0] == 401
        assert (await asked(fleet, "/ui/state", **bearer(ALICE)))[0] == 401
        status, headers, body = await asked(fleet, "/ui/state", **{"X-API-Key": ADMIN})

    assert status == 200
    assert fleet.e.url in body
    assert ADMIN not in body
    assert headers["Cache-Control"] == "no-store"


@pytest.mark.security("S3")
@pytest.mark.parametrize(
    ("site", "expected"), [("same-origin", 200), ("same-site", 403), ("cross-site", 403)]
)
async def test_on_this_machine_its_own_page_may_ask_and_no_other(
    launch: Launch, site: str, expected: int
) -> None:
    async with launch() as fleet:
        own = {"Sec-Fetch-Site": site}

        assert (await asked(fleet, "/ui/state", **own))[0] == expected
        assert (await asked(fleet, "/ui/state", **own, Origin="http://localhost"))[0] == 403
        assert (await asked(fleet, "/ui/state", **own, Host="evil.example"))[0] == 403


async def test_the_root_leads_to_the_page(launch: Launch, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(key_line("alice", ALICE))
    keys.chmod(0o600)
    async with launch(api_keys_file=keys) as fleet:
        async with fleet.http.get(fleet.url, allow_redirects=False) as reply:
            assert (reply.status, reply.headers["Location"]) == (302, "/ui")
        async with fleet.http.get(fleet.url) as reply:
            assert (reply.status, reply.content_type) == (200, "text/html")


@pytest.mark.parametrize("path", ["/ui", "/ui/app.js", "/ui/style.css"])
async def test_the_content_security_policy_allows_only_the_pages_script(
    launch: Launch, path: str
) -> None:
    async with launch() as fleet:
        _, headers, body = await asked(fleet, path)

    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "Set-Cookie" not in headers
    assert not re.search(r"https?://(?!www\.w3\.org/)[a-z]|innerHTML|insertAdjacent|eval\(", body)


@pytest.mark.parametrize("name", ["nothing.js", "..%2fboard.py", "%2e%2e/board.py", "__init__.py"])
async def test_ui_serves_no_files_but_its_own(launch: Launch, name: str) -> None:
    async with launch() as fleet:
        assert (await asked(fleet, f"/ui/{name}"))[0] == 404


async def test_the_state_contains_recent_events(launch: Launch) -> None:
    async with launch(prefill=1) as fleet:
        assert (await fleet.chat(request(image(), text()), {"X-Request-Id": "mine"}))[0] == 200
        fleet.d.chat = refuses(400)
        assert (await fleet.chat(request(text())))[0] == 400
        state = await state_of(fleet.url)

    failed, answered = state["requests"]
    assert answered["id"] == "mine"
    assert [span["stage"] for span in answered["spans"]] == ["encode", "prefill", "decode"]
    assert (failed["status"], failed["error"]) == (400, "decode_rejected")
    assert [one["message"] for one in state["notices"]] == ["decode_rejected"]
    assert (failed["outcome"], state["notices"][0]["outcome"]) == ("rejected", "rejected")
    assert state["notices"][0]["more"] == "400 the decode instance answered 400 BadRequestError"
    assert {one["stage"]: (one["failed"], one["rejected"]) for one in state["stages"]}[
        "decode"
    ] == (0, 1)
    assert (state["totals"]["failed"], state["totals"]["rejected"]) == (0, 1)
    assert state["totals"]["requests"] == 2
    assert {one["role"]: one["count"] for one in state["instances"]} == {
        "encode": 1,
        "prefill": 2,
        "decode": 2,
    }


async def test_the_state_is_built_at_most_twice_a_second(launch: Launch) -> None:
    async with launch() as fleet:
        bodies = await asyncio.gather(*(asked(fleet, "/ui/state") for _ in range(50)))

    assert len({body for *_, body in bodies}) <= 3


async def test_the_state_has_the_use_of_the_store(launch: Launch, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store?max_bytes=1MiB"
    with open_store(url) as store:
        assert registered(store)
        assert store.put(EntryKey(NAMESPACE, "a"), sized(3000))
        used = store.stats()
        async with launch(ec_store=url) as fleet:
            state = await shown(fleet.url, lambda state: bool(state["stores"][0]["known"]))

    assert state["store"] == "file"
    assert state["stores"] == [
        {
            "name": "file",
            "known": True,
            "bypassed": False,
            "entries": 1,
            "bytes": used.bytes,
            "max_bytes": 2**20,
            "evictions": None,  # those of other processes
            "refused": None,
        }
    ]


async def test_the_state_has_the_evictions_of_a_hosts_memory(
    launch: Launch, tmp_path: Path
) -> None:
    path = tmp_path / "arena.sock"
    with serving(path) as server:
        server.arena.refused = 2
        async with launch(ec_store=f"shm://{path}") as fleet:
            state = await shown(fleet.url, lambda state: bool(state["stores"][0]["known"]))

    [store] = state["stores"]
    assert (store["name"], store["entries"], store["evictions"]) == ("shm", 0, 0)
    assert (store["max_bytes"], store["refused"]) == (server.arena.size_bytes, 2)


async def test_a_store_that_hangs_does_not_delay_the_state(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    async def hang(_: object) -> None:
        nonlocal asked
        asked += 1
        await asyncio.Event().wait()

    monkeypatch.setattr(AsyncStore, "stats", hang)
    with open_store(f"file://{tmp_path}/store") as store:
        assert registered(store)
    async with launch(ec_store=f"file://{tmp_path}/store") as fleet:
        await fleet.ready()  # the proxy has opened the store
        state = await state_of(fleet.url)
        answered = await fleet.chat(request(image(), text()))
        await state_of(fleet.url)

    assert [store["known"] for store in state["stores"]] == [False]
    assert answered[0] == 200
    assert asked == 1


async def test_the_state_has_no_store_without_one(launch: Launch) -> None:
    async with launch() as fleet:
        state = await state_of(fleet.url)

    assert (state["store"], state["stores"]) == (None, [])


async def test_the_state_has_what_instances_report(launch: Launch) -> None:
    async with launch(load_interval_s=0.1) as fleet:
        fleet.d.metrics = page(
            "\nvllm:num_requests_running{} 5\nvllm:num_requests_waiting{} 3\n"
            "vllm:kv_cache_usage_perc{} 0.42\nvllm:prefix_cache_queries_total{} 1000\n"
            "vllm:prefix_cache_hits_total{} 720\n"
        )
        state = await shown(
            fleet.url,
            lambda state: (
                state["instances"][1]["kv_usage"] is not None
                and None not in {one["version"] for one in state["instances"]}
            ),
        )

    encode, decode = state["instances"]
    assert [decode[name] for name in ("waiting", "kv_usage", "prefix_hits")] == [
        3,
        0.42,
        0.72,
    ]
    assert [encode[name] for name in ("waiting", "kv_usage", "prefix_hits")] == [None] * 3
    assert [one["version"] for one in state["instances"]] == ["0.33.0"] * 2


async def test_instances_are_not_asked_without_a_reader(launch: Launch) -> None:
    async with launch(load_interval_s=0.1) as fleet:
        assert (await fleet.chat(request(text())))[0] == 200
        await asyncio.sleep(0.3)
        assert fleet.d.other_calls == []
        await shown(fleet.url, lambda state: state["instances"][1]["version"] is not None)

    assert fleet.d.other_calls == ["GET /version"]


async def test_the_time_to_the_first_token_is_that_of_streams(launch: Launch) -> None:
    async with launch() as fleet:
        assert (await fleet.chat(request(text())))[0] == 200
        before = await state_of(fleet.url)
        async with fleet.post({**request(text()), "stream": True}) as reply:
            await reply.read()
        state = await shown(fleet.url, lambda state: state["totals"]["requests"] == 2)
        [stream] = [event for event in fleet.events.requests if event.stream]

    assert (before["first_token"]["count"], before["first_token"]["p50_s"]) == (0, None)
    assert before["answered"]["count"] == 1
    assert state["first_token"]["count"] == 1
    assert state["first_token"]["p50_s"] == state["first_token"]["p90_s"] == stream.first_token_s
    assert state["answered"]["count"] == 2


def board(fleet: Fleet, pages: list[SharedPage], index: int, pace: Pace = PACE) -> Board:
    """Return the board of a proxy as one of several workers."""
    app = fleet.runner.app
    readings = app[BOARD].readings
    return Board(app[RECENT], app[TABLE], app[METRICS], None, readings, pages, index, pace)


async def keep_writing(written: Board) -> None:
    assert written.pages is not None
    await written.pages.keep_writing()


async def test_a_board_is_written_only_while_it_is_read(launch: Launch) -> None:
    soon = Pace(write_s=0.001, wanted_s=5, poll_s=0.05)
    with closing(SharedPage.new_page()) as first, closing(SharedPage.new_page()) as second:
        async with launch() as here, launch() as there:
            pages = [first, second]
            reader = board(here, pages, 0, soon)
            writing = asyncio.create_task(keep_writing(board(there, pages, 1, soon)))
            try:
                await there.chat(request(text()))
                assert second.write_count() == 0

                # The first poll makes the other worker publish its current state.
                assert len(json.loads(await reader.document())["requests"]) == 1
                written = second.write_count()
                await there.chat(request(text()))
                await until(lambda: second.write_count() > written)

                writing.cancel()
                unread = board(there, pages, 1, soon._replace(wanted_s=0))
                writing = asyncio.create_task(keep_writing(unread))
                written = second.write_count()
                await there.chat(request(text()))
                await asyncio.sleep(0.05)
                assert second.write_count() == written
            finally:
                writing.cancel()


async def test_the_state_of_all_workers_does_not_wait_for_a_silent_one(launch: Launch) -> None:
    with closing(SharedPage.new_page()) as first, closing(SharedPage.new_page()) as second:
        async with launch() as here:
            body = await board(here, [first, second], 0).document()

    assert json.loads(body)["workers"] == 1


async def test_any_worker_reports_the_state_of_all_living_workers() -> None:
    encode, decode = FakeInstance(encodes), FakeInstance(decodes)
    async with encode.running(), decode.running():
        flags = ("--encode-servers-urls", encode.url, "--decode-servers-urls", decode.url)
        async with some_workers(2, *flags) as workers:

            async def ask(number: int) -> None:
                async with (
                    aiohttp.ClientSession() as http,
                    http.post(
                        f"{workers.url}/v1/chat/completions",
                        json=request(text()),
                        headers={"X-Request-Id": f"r{number}"},
                    ) as reply,
                ):
                    assert reply.status == 200

            await asyncio.gather(*map(ask, range(24)))
            expected = {f"r{number}" for number in range(24)}
            for _ in range(8):
                await shown(workers.url, lambda state: ids(state) == expected)
            state = await state_of(workers.url)
            assert state["workers"] == 2
            assert len(state["instances"]) == 2

            os.kill(workers.pids(1)[0], signal.SIGKILL)
            await until(lambda: len(workers.pids(1)) == 2, START_S)
            await shown(workers.url, lambda state: state["workers"] == 2 and ids(state) < expected)


def top(url: str, *flags: str, key: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*EPD, "top", "--url", url, *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"EPD_ADMIN_API_KEY": key, "COLUMNS": "100"},
    )


@pytest.mark.parametrize("flags", [[], ["--once"]])
async def test_top_prints_one_frame_without_a_terminal(launch: Launch, flags: list[str]) -> None:
    async with launch(admin_api_key=ADMIN) as fleet:
        assert (await fleet.chat(request(image(), text()), {"X-Request-Id": "mine"}))[0] == 200
        shown = await asyncio.to_thread(top, fleet.url, *flags, key=ADMIN)
        refused = await asyncio.to_thread(top, fleet.url, "--once")

    assert shown.returncode == 0
    for part in ("EPD proxy", "1e1d", "mine", "decode", fleet.e.url.removeprefix("http://")):
        assert part.replace("1e1d", "1e1pd") in shown.stdout
    assert "\x1b" not in shown.stdout
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "the admin key is required" in refused.stderr
    assert ADMIN not in shown.stdout + refused.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--url", "localhost:8000"], "is not an http(s) URL"),
        (["--url", "http://127.0.0.1:1", "--once"], "does not answer: Connection refused. Is the"),
    ],
)
def test_top_reports_an_error_in_one_line(flags: list[str], message: str) -> None:
    ended = called("top", "--url", "http://127.0.0.1:1", *flags)

    assert ended.returncode in {1, 2}
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1


async def test_top_reports_a_missing_proxy() -> None:
    async with FakeInstance(encodes).running() as engine:
        ended = await asyncio.to_thread(top, engine.url, "--once")

    assert ended.returncode == 1
    assert "is not an EPD proxy of this version" in ended.stderr


@pytest.mark.parametrize(
    ("document", "shown"),
    [
        ({"error": {"message": "no entry"}}, "no entry"),
        ({"error": "no entry"}, "no entry"),
        ({"error": {}}, "401"),
        ({"error": None}, "401"),
        (["error"], "401"),
    ],
)
async def test_top_shows_the_rejection_of_any_server(
    aiohttp_server: AiohttpServer, document: object, shown: str
) -> None:
    async def reject(_: web.Request) -> web.Response:
        return web.json_response(document, status=401)

    app = web.Application()
    app.router.add_get("/ui/state", reject)
    server = await aiohttp_server(app)
    ended = await asyncio.to_thread(top, str(server.make_url("/")).rstrip("/"), "--once")

    assert ended.returncode == 1
    assert f"rejects the request: {shown} (" in ended.stderr
    assert ended.stderr.count("\n") == 1


async def test_top_redraws_in_a_terminal_until_q_is_pressed(launch: Launch) -> None:
    async with launch() as fleet:
        main, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (24, 80))
        before = termios.tcgetattr(terminal)
        process = subprocess.Popen(  # noqa: ASYNC220 - it takes a millisecond
            [*EPD, "top", "--url", fleet.url],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env={name: value for name, value in os.environ.items() if name != "COLUMNS"}
            | {"TERM": "xterm-256color"},
        )
        seen = ""

        async def until_shown(words: str) -> None:
            nonlocal seen
            async with asyncio.timeout(40):
                while words not in seen:
                    if await asyncio.to_thread(select.select, [main], [], [], 0.2) != ([], [], []):
                        seen += os.read(main, 65536).decode("utf-8", "replace")

        try:
            await until_shown("EPD proxy")
            assert (await fleet.chat(request(text()), {"X-Request-Id": "later"}))[0] == 200
            await until_shown("later")
            os.write(main, b"q")
            assert await asyncio.to_thread(process.wait, 20) == 0
            assert termios.tcgetattr(terminal) == before
        finally:
            process.kill()
            process.wait()
            os.close(main)
            os.close(terminal)
