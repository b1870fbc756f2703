"""`/policies` shows and changes the policies in force, in one process and in all workers."""

import asyncio
import json
import os
import signal
from typing import Any

import aiohttp
import pytest

from tests.requests import request, text
from tests.support.fake_instance import FakeInstance, decodes, encodes, prefills
from tests.support.fleet import Launch, until
from tests.support.picker import asked
from tests.support.reloading import everywhere, proxy

ADMIN = "admin-key-0123456789"
KEY = {"X-API-Key": ADMIN}
USUAL = ["encode_prefill_decode", "encode_pd"]
SHORT = "pd_only?skip_prefill_below_tokens=20"
SETTINGS = {"admin_api_key": ADMIN}


async def call(
    url: str, method: str, body: object = None, query: str = "", key: str = ADMIN
) -> tuple[int, dict[str, Any]]:
    """Send a request on a new connection, which any worker may accept."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"X-API-Key": key} if key else {})
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.request(method, f"{url}/policies{query}", data=data) as reply,
    ):
        return reply.status, await reply.json()


async def in_force(url: str) -> list[str]:
    status, said = await call(url, "GET")
    assert status == 200
    return [row["policy"] for row in said["policies"]]


async def test_policies_in_force_are_shown_with_all_options(launch: Launch) -> None:
    async with launch(1, 1, 1, skip_prefill_below_tokens=7, **SETTINGS) as fleet:
        status, said = await call(fleet.url, "GET")

    assert status == 200
    assert said["from"] == "configuration"
    assert [row["name"] for row in said["policies"]] == ["pd_only", *USUAL]
    assert said["policies"][0] == {
        "policy": "pd_only",
        "name": "pd_only",
        "options": {
            "skip_prefill_below_tokens": 7,
            "skip_prefill_for_text": False,
            "decode_choice": "late",
            "decode_from": "table",
        },
    }
    assert set(said["known"]) >= {"encode_pd", "pd_only", "prefill_decode"}


async def test_a_set_policy_takes_effect_at_once(launch: Launch) -> None:
    async with launch(1, 1, 1, **SETTINGS) as fleet:
        await fleet.chat(request(text()))
        assert asked(fleet) == (0, 1, 1)

        status, said = await call(fleet.url, "PUT", {"policies": [SHORT, *USUAL]})
        assert (status, said["from"]) == (200, "api")
        await fleet.chat(request(text()))
        assert asked(fleet) == (0, 1, 2)
        decided = [one.policy for one in fleet.events.requests]
        assert decided == [USUAL[0], None, "pd_only"]  # not a request to instances: no policy

        status, said = await call(fleet.url, "DELETE")
        assert (status, said["from"]) == (200, "configuration")
        await fleet.chat(request(text()))
        assert asked(fleet) == (0, 2, 3)


async def test_policies_are_added_moved_changed_and_removed(launch: Launch) -> None:
    async with launch(1, 1, 1, **SETTINGS) as fleet:
        for method, body, query, after in (
            ("POST", {"policy": "prefill_decode"}, "", ["prefill_decode", *USUAL]),
            ("POST", {"policy": SHORT, "priority": 2}, "", ["prefill_decode", SHORT, *USUAL]),
            (
                *("POST", {"policy": "prefill_decode?decode_choice=early"}, ""),
                ["prefill_decode?decode_choice=early", SHORT, *USUAL],
            ),
            (
                *("POST", {"policy": "prefill_decode", "priority": 99}, ""),
                [SHORT, *USUAL, "prefill_decode"],
            ),
            ("DELETE", None, "?name=pd_only", [*USUAL, "prefill_decode"]),
            ("DELETE", None, "", USUAL),
        ):
            status, said = await call(fleet.url, method, body, query)

            assert (status, [row["policy"] for row in said["policies"]]) == (200, after)
            assert await in_force(fleet.url) == after


CANNOT: list[tuple[str, object, int, str]] = [
    ("PUT", {"policies": []}, 422, "at least one policy is needed"),
    ("PUT", {"policies": [*USUAL, "nothing"]}, 422, "there is no policy 'nothing'"),
    ("PUT", {"policies": "encode_pd"}, 422, "the body must be"),
    ("PUT", {"policies": ["encode_pd?decode_from=picker"]}, 422, "--decode-picker-url"),
    ("PUT", {"policies": ["e" * 9999]}, 422, "at most 1024 characters"),
    ("PUT", {"policies": ["encode_pd"]}, 422, "no request would be served"),
    ("PUT", b"{", 400, "not valid JSON"),
    ("POST", {"policy": "pd_only"}, 422, "does nothing without"),
    ("POST", {"policy": SHORT.replace("20", "-1")}, 422, "greater than or equal to 0"),
    ("POST", {"policy": SHORT.replace("20", "9" * 30)}, 422, "less than or equal to"),
    ("POST", {"policy": "prefill_decode", "priority": 0}, 422, "whole number from 1"),
    ("POST", {"policy": "prefill_decode", "priority": True}, 422, "whole number from 1"),
    ("POST", {"policy": "prefill_decode", "more": 1}, 422, "the body must be"),
    (
        *("POST", {"policy": "prefill_local_decode_remote?local_prefill_url=http://x:1"}, 422),
        "must be one of --prefill-servers-urls",
    ),
    ("DELETE", "?name=pd_only", 404, "not in force"),
    ("DELETE", "?nam=encode_pd", 400, "the query must be"),
    ("DELETE", "?name=encode_pd&name=pd_only", 400, "the query must be"),
]


@pytest.mark.parametrize("case", CANNOT)
async def test_invalid_policies_change_nothing(
    launch: Launch, case: tuple[str, object, int, str]
) -> None:
    method, body, status, message = case
    async with launch(1, 1, 1, **SETTINGS) as fleet:
        query, body = (body, None) if isinstance(body, str) else ("", body)
        found, said = await call(fleet.url, method, body, query)

        assert found == status
        assert message in said["error"]["message"]
        assert await in_force(fleet.url) == USUAL


@pytest.mark.parametrize("method", ["GET", "PUT", "POST", "DELETE"])
async def test_changes_of_policies_need_the_admin_key(launch: Launch, method: str) -> None:
    async with launch(1, 1, 1, **SETTINGS) as fleet:
        body = {"policies": ["prefill_decode"], "policy": "prefill_decode"}
        for key in ("", "wrong"):
            status, said = await call(fleet.url, method, body, key=key)
            assert (status, said["error"]["type"]) == (401, "AuthenticationError")
        assert await in_force(fleet.url) == USUAL


async def all_have(url: str, expected: list[str]) -> None:
    """Check on many connections, which reach all workers, that these policies are in force."""
    found = await asyncio.gather(*(in_force(url) for _ in range(16)))
    assert all(one == expected for one in found), found


async def chat(url: str) -> int:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/chat/completions", json=request(text())) as reply,
    ):
        return reply.status


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_change_reaches_all_workers_and_a_new_one_has_it(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPD_ADMIN_API_KEY", ADMIN)
    encode, p, decode = FakeInstance(encodes), FakeInstance(prefills), FakeInstance(decodes)
    async with encode.running(), p.running(), decode.running():
        urls = [
            *("--encode-servers-urls", encode.url, "--prefill-servers-urls", p.url),
            *("--decode-servers-urls", decode.url),
        ]
        async with proxy(workers, *urls) as running:
            assert await everywhere(lambda: chat(running.url)) == {200}
            assert p.calls
            status, _ = await call(running.url, "POST", {"policy": SHORT})
            assert status == 200
            await all_have(running.url, [SHORT, *USUAL])
            p.calls.clear()
            assert await everywhere(lambda: chat(running.url)) == {200}
            assert not p.calls

            if workers > 1:
                os.kill(running.pids(1)[0], signal.SIGKILL)
                await until(lambda: len(running.pids(1)) == 2, 120)
                await all_have(running.url, [SHORT, *USUAL])

            status, _ = await call(running.url, "PUT", {"policies": ["encode_prefill_decode"]})
            assert status == 200
            await all_have(running.url, ["encode_prefill_decode"])
            status, said = await call(running.url, "DELETE")
            assert (status, said["from"]) == (200, "configuration")
            await all_have(running.url, USUAL)
