"""Conversations over real sockets: prefill reads decode's KV blocks of the previous turn."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import SecretStr
from structlog.testing import capture_logs

from epd.conversations.entry import parse_entry
from epd.request.stages import Stages
from epd.routing.instances import Role
from epd.server import app as proxy_app
from epd.server.api_routes import CONVERSATIONS
from epd.server.app_keys import ADMISSION, TABLE
from tests.requests import image
from tests.support.clients import ALICE, BOB, bearer
from tests.support.fake_instance import (
    FakeInstance,
    Handler,
    drops,
    fails_first,
    hangs,
    refuses,
)
from tests.support.fake_turns import PICTURE, WRONG, Turns, rendered
from tests.support.fleet import Fleet, Launch, until
from tests.support.redis_server import RedisServer

BUDGET_S = 5.0
"""Time budget of lookups; large, so that results do not depend on the speed of the machine."""


@asynccontextmanager
async def talking(
    launch: Launch, turns: Turns, prefill: int = 1, decode: int = 1, **config: Any
) -> AsyncIterator[Fleet]:
    config = {"conversation_budget_s": BUDGET_S, "load_interval_s": 0.05, **config}
    async with launch(encode=1, prefill=prefill, decode=decode, **config) as fleet:
        for instance in fleet.prefill:
            turns.start(instance, decode=False)
        for instance in fleet.decode:
            turns.start(instance, decode=True)
        yield fleet


async def report_blocks(fleet: Fleet) -> None:
    """Wait until decode has reported the size of its blocks."""
    table = fleet.runner.app[TABLE]
    [decode] = table.all(Role.DECODE)
    await until(lambda: decode.load.report is not None and decode.load.report.block_tokens)


@dataclass
class Talk:
    """Client that sends the whole history with each turn."""

    fleet: Fleet
    name: str = "talk"
    stream: bool = False
    headers: dict[str, str] | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)

    async def ask(self, content: Any, **more: Any) -> str:
        """Send the next turn, add the answer to the history and return it."""
        self.history.append({"role": "user", "content": content})
        asked = {"messages": self.history, "stream": self.stream, "conversation_id": self.name}
        body = {"model": "m", **asked, **self.more, **more}
        said = await heard(self.fleet, body, self.headers)
        self.history.append({"role": "assistant", "content": said})
        return said


async def heard(fleet: Fleet, body: dict[str, Any], headers: dict[str, str] | None = None) -> str:
    async with fleet.post(body, headers) as reply:
        assert reply.status == 200, await reply.text()
        raw = await reply.read()
    assert b'kv_transfer_params":{' not in raw.replace(b" ", b"")
    assert b"remote_host" not in raw
    if not body["stream"]:
        answer = json.loads(raw)
        assert answer.get("usage")
        return str(answer["choices"][0]["message"]["content"])
    events = [line.removeprefix("data: ") for line in raw.decode().split("\n\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    return "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)


async def figures(fleet: Fleet) -> dict[str, int]:
    async with fleet.http.get(fleet.url + "/metrics") as reply:
        page = await reply.text()
    lines = [line for line in page.splitlines() if line.startswith("epd_conversation_turns_total")]
    return {line.split('"')[1]: int(float(line.split()[-1])) for line in lines}


def entries(fleet: Fleet) -> tuple[int | None, int]:
    """Return the numbers of stored conversations, and of those dropped before a next turn."""
    store = fleet.runner.app[CONVERSATIONS].store
    return store.entry_count, store.dropped_count


async def test_a_turn_with_a_too_large_answer_is_not_retried(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_app, "Stages", partial(Stages, max_decode_bytes=100))
    async with talking(launch, Turns(), prefill=1, decode=2) as fleet:
        body = {"messages": [{"role": "user", "content": "a"}], "conversation_id": "talk"}
        async with fleet.post({"model": "m", **body}) as reply:
            assert (reply.status, reply.headers["x-epd-error"]) == (502, "decode_bad_response")

        assert sum(len(instance.calls) for instance in fleet.decode) == 1
        assert fleet.runner.app[ADMISSION].body_bytes == 0


@pytest.mark.parametrize(("room", "status"), [(2**30, 200), (1024, 503)])
async def test_the_answer_to_a_turn_is_held_whole_and_counts(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, room: int, status: int
) -> None:
    monkeypatch.setattr(proxy_app, "Stages", partial(Stages, whole_bytes=10))
    config = {"max_inflight_bytes": room}
    async with talking(launch, Turns(), **config) as fleet:
        body = {"messages": [{"role": "user", "content": "a"}], "conversation_id": "talk"}
        async with fleet.post({"model": "m", **body, "max_tokens": 400}) as reply:
            raw = await reply.read()
            assert reply.status == status
            assert b"remote_host" not in raw


LONG = "a question of so many words that its tokens are more than a few, number "


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 2)])
async def test_each_turn_reads_all_of_the_last_one_that_was_computed(
    launch: Launch, prefill: int, decode: int, stream: bool
) -> None:
    turns = Turns()
    async with talking(launch, turns, prefill, decode) as fleet:
        talk = Talk(fleet, stream=stream)
        for number in range(5):
            before = rendered({"messages": talk.history})[: -len("<assistant>")]
            said = await talk.ask(LONG + str(number))
            assert said != WRONG
            if number:
                # All tokens except the one sampled last and the end mark after it.
                assert turns.read[-1] == len(before) - 2
        assert len(turns.read) == 4
        assert (await figures(fleet)) == {
            "hit": 4,
            "miss": 1,
            "stale": 0,
            "changed": 0,
            "failed": 0,
            "rested": 0,
            "unknown": 0,
        }
        assert entries(fleet) == (1, 0)
        # Always the same prefill instance.
        assert sorted(len(one.calls) > 0 for one in fleet.prefill) == [False] * (prefill - 1) + [
            True
        ]
        assert sorted(len(one.calls) > 0 for one in fleet.decode) == [False] * (decode - 1) + [True]


async def test_a_request_without_a_conversation_is_sent_unchanged(launch: Launch) -> None:
    turns = Turns()
    async with talking(launch, turns) as fleet:
        body = {"model": "m", "messages": [{"role": "user", "content": LONG}], "stream": False}
        for _ in range(2):
            async with fleet.post(body) as reply:
                said = await reply.json()
        assert said["kv_transfer_params"]["do_remote_decode"] is True
        assert not turns.read
        assert {call.path for call in fleet.p.calls} == {"/v1/chat/completions"}
        assert not any("return_token_ids" in call.body for call in fleet.d.calls)
        assert not any((await figures(fleet)).values())


async def test_completions_are_continued_too(launch: Launch) -> None:
    for as_tokens in (False, True):
        turns = Turns()
        async with talking(launch, turns) as fleet:
            prompt = LONG
            for number in range(3):
                body = {"model": "m", "prompt": [*map(ord, prompt)] if as_tokens else prompt}
                url = fleet.url + "/v1/completions"
                async with fleet.http.post(url, json={**body, "conversation_id": "c"}) as reply:
                    said = await reply.json()
                assert said["kv_transfer_params"] is None
                [choice] = said["choices"]
                assert choice["text"] != WRONG
                prompt += choice["text"] + str(number)
            assert len(turns.read) == 2
            asked = [call.path for call in fleet.p.calls].count("/tokenize")
            assert asked == (0 if as_tokens else 2)


async def test_a_conversation_with_pictures_is_continued(launch: Launch) -> None:
    turns = Turns()
    async with talking(launch, turns) as fleet:
        talk = Talk(fleet)
        for number in range(3):
            picture = image(b"picture %d" % number)
            said = await talk.ask([picture, {"type": "text", "text": LONG + str(number)}])
            assert said != WRONG
        assert len(turns.read) == 2
        assert turns.read[-1] > 2 * len(PICTURE)


async def test_a_changed_picture_of_the_same_size_prevents_the_readback(
    launch: Launch,
) -> None:
    turns = Turns()
    async with talking(launch, turns) as fleet:
        talk = Talk(fleet)
        await talk.ask([image(b"one"), {"type": "text", "text": LONG}])
        talk.history[0]["content"][0] = image(b"another")
        await talk.ask(LONG)
        assert not turns.read
        assert (await figures(fleet))["changed"] == 1


async def test_readback_ends_at_an_edit_of_the_history(
    launch: Launch,
) -> None:
    turns = Turns()
    async with talking(launch, turns) as fleet:
        await report_blocks(fleet)
        talk = Talk(fleet)
        first = len(rendered({"messages": [{"role": "user", "content": LONG}]}))
        await talk.ask(LONG)
        talk.history[-1]["content"] = "something that no model said"
        said = await talk.ask(LONG)
        assert said != WRONG
        assert turns.read == [first // 32 * 32]


async def test_thoughts_that_the_template_drops_are_not_read(launch: Launch) -> None:
    turns = Turns(answers=lambda _: "<think>hm</think>" + "yes " * 30)
    turns.keep = lambda words: words.rpartition("</think>")[2]
    async with talking(launch, turns) as fleet:
        await report_blocks(fleet)
        talk = Talk(fleet)
        for number in range(3):
            assert await talk.ask(LONG + str(number)) != WRONG
        assert len(turns.read) == 2


async def test_an_edited_history_is_not_read_back_without_a_block_size(launch: Launch) -> None:
    turns = Turns()
    async with talking(launch, turns, load_interval_s=0) as fleet:
        talk = Talk(fleet)
        await talk.ask(LONG)
        talk.history[-1]["content"] = "something that no model said"
        assert await talk.ask(LONG) != WRONG
        assert not turns.read


@pytest.mark.parametrize(
    "other",
    [
        {"messages": [{"role": "user", "content": "Something else, of as many words, " + LONG}]},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"model": "another"},
        {"cache_salt": "mine"},
    ],
)
async def test_a_different_prompt_is_computed(launch: Launch, other: dict[str, Any]) -> None:
    turns = Turns()
    async with talking(launch, turns) as fleet:
        talk = Talk(fleet)
        await talk.ask(LONG)
        body: dict[str, Any] = {"model": "m", "messages": talk.history, "stream": False}
        body["conversation_id"] = "talk"
        assert await heard(fleet, {**body, **other}) != WRONG
        assert not turns.read


async def test_several_answers_to_one_request_are_not_continued(launch: Launch) -> None:
    turns = Turns()
    async with talking(launch, turns) as fleet:
        talk = Talk(fleet, more={"n": 2})
        await talk.ask(LONG)
        await talk.ask(LONG)
        assert not turns.read


async def test_a_client_gets_the_token_ids_that_it_requests(launch: Launch) -> None:
    turns = Turns()
    async with talking(launch, turns) as fleet:
        body = {"model": "m", "messages": [{"role": "user", "content": LONG}]}
        asked = body | {"conversation_id": "c", "return_token_ids": True}
        async with fleet.post(asked) as reply:
            said = await reply.json()
        assert said["prompt_token_ids"]
        assert said["choices"][0]["token_ids"]
        assert said["kv_transfer_params"] is None
        async with fleet.post(body | {"conversation_id": "c"}) as reply:
            said = await reply.json()
        assert said["prompt_token_ids"] is None
        assert said["choices"][0]["token_ids"] is None


@pytest.mark.parametrize("name", ["", "x" * 257, 1, ["c"], {}, True])
async def test_an_invalid_conversation_id_is_rejected(launch: Launch, name: object) -> None:
    async with launch() as fleet:
        body = {"model": "m", "messages": [], "conversation_id": name}
        status, said = await fleet.chat(body)
        assert status == 400
        assert said["error"]["param"] == "conversation_id"


async def test_no_instance_sees_the_name_at_any_endpoint(launch: Launch) -> None:
    async with launch(prefill=1) as fleet:
        bodies: dict[str, dict[str, Any]] = {
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
            "/v1/completions": {"prompt": "hi"},
            "/v1/responses": {"input": "hi"},
            "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
            "/v1/embeddings": {"input": "hi"},
            "/tokenize": {"prompt": "hi"},
        }
        for path, body in bodies.items():
            asked = {"model": "m", **body, "conversation_id": "secret-name"}
            async with fleet.http.post(fleet.url + path, json=asked) as reply:
                assert reply.status == 200, await reply.text()
        calls = [call for instance in fleet.instances for call in instance.calls]
        assert len(calls) > 6
        assert not any("conversation_id" in call.body for call in calls)


async def test_conversation_fields_of_other_endpoints_are_forwarded_unchanged(
    launch: Launch,
) -> None:
    """A tool may have arguments with these names, of any type."""
    arguments = {"token_ids": [1, 2], "prompt_token_ids": [3], "kv_transfer_params": {"x": 1}}
    said = {"content": [{"type": "tool_use", "name": "f", "input": arguments}]}

    async def calls_a_tool(_: web.Request, __: dict[str, Any]) -> web.Response:
        return web.json_response(said)

    turns = Turns()
    async with talking(launch, turns) as fleet:
        fleet.d.chat = calls_a_tool
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
        for path in ("/v1/messages", "/v1/responses"):
            asked = {**body, "input": "hi", "conversation_id": "c"}
            async with fleet.http.post(fleet.url + path, json=asked) as reply:
                assert (reply.status, await reply.json()) == (200, said)


async def test_a_rejected_turn_does_not_affect_the_next(launch: Launch) -> None:
    turns = Turns()
    async with talking(launch, turns, decode_from="header") as fleet:
        talk = Talk(fleet)
        await talk.ask(LONG)
        body = {"model": "m", "messages": talk.history, "conversation_id": "talk"}
        async with fleet.post(body, {"x-decoder-host-port": "nonsense"}) as reply:
            assert reply.status == 400
        encodes, fleet.e.chat = fleet.e.chat, refuses(400, "no picture")
        shown = {"role": "user", "content": [image(b"1")]}
        async with fleet.post({**body, "messages": [*talk.history, shown]}) as reply:
            assert reply.status == 400
        fleet.e.chat = encodes
        assert await talk.ask(LONG) != WRONG
        assert len(turns.read) == 1


async def test_tenants_with_the_same_conversation_id_share_nothing(
    launch: Launch, keys: Path
) -> None:
    turns = Turns()
    async with talking(launch, turns, api_keys_file=keys, isolation="shared") as fleet:
        alice = Talk(fleet, headers=bearer(ALICE))
        bob = Talk(fleet, headers=bearer(BOB), history=[])
        await alice.ask(LONG)
        bob.history = [*alice.history]
        await bob.ask(LONG)
        assert not turns.read
        assert (await figures(fleet))["miss"] == 2
        await alice.ask(LONG)
        assert len(turns.read) == 1


async def test_conversations_that_expire_are_counted(launch: Launch) -> None:
    async with talking(launch, Turns(), conversation_ttl=0.05) as fleet:
        await Talk(fleet).ask(LONG)
        await asyncio.sleep(0.1)
        assert entries(fleet) == (0, 1)


async def test_blocks_of_a_decode_instance_that_went_down_are_stale(launch: Launch) -> None:
    turns = Turns()
    async with talking(launch, turns, decode=2, probe_interval_s=0.05) as fleet:
        talk = Talk(fleet)
        await talk.ask(LONG)
        used = next(one for one in fleet.decode if one.calls)
        used.healthy = False
        await until(lambda: any(one.state == "down" for one in fleet.events.changes))
        used.healthy = True
        await until(lambda: fleet.events.changes[-1].state != "down")
        assert await talk.ask(LONG) != WRONG
        assert not turns.read
        assert (await figures(fleet))["stale"] == 1


async def test_blocks_of_a_removed_decode_instance_are_stale(launch: Launch) -> None:
    turns = Turns()
    admin: dict[str, Any] = {
        "dynamic_registration": True,
        "admin_api_key": "an-admin-key-of-length",
    }
    async with (
        talking(launch, turns, decode=0, **admin) as fleet,
        FakeInstance(hangs).running() as other,
    ):
        turns.start(other, decode=True)
        url, headers = fleet.url + "/instances", bearer("an-admin-key-of-length")
        entry = {"url": other.url, "role": "decode"}
        talk = Talk(fleet)
        for _ in range(2):
            async with fleet.http.post(url, json=entry, headers=headers) as reply:
                assert reply.status == 200, await reply.text()
            await talk.ask(LONG)
            await fleet.http.delete(url, params={"url": other.url}, headers=headers)
        assert not turns.read
        assert fleet.runner.app[CONVERSATIONS].results["stale"] == 1


async def test_a_restarted_decode_instance_is_detected_by_its_next_response(
    launch: Launch,
) -> None:
    turns = Turns()
    async with talking(launch, turns) as fleet:
        old, other = Talk(fleet, name="old"), Talk(fleet, name="other")
        await old.ask(LONG)
        turns.start(fleet.d, decode=True)
        await other.ask(LONG)
        assert await old.ask(LONG) != WRONG
        assert not turns.read
        assert (await figures(fleet))["stale"] == 1
        assert await other.ask(LONG) != WRONG
        assert len(turns.read) == 1


async def test_a_prefill_that_cannot_read_is_asked_once_more_to_compute(launch: Launch) -> None:
    turns = Turns()
    async with talking(launch, turns, eject_after=1) as fleet:
        talk = Talk(fleet)
        await talk.ask(LONG)
        for engine in turns.engines.values():
            engine.expired = True
        turns.start(fleet.p, decode=False)
        turns.start(fleet.d, decode=True)
        assert await talk.ask(LONG) != WRONG
        assert [call.path for call in fleet.p.calls][-3:] == [
            "/tokenize",
            "/v1/chat/completions",
            "/v1/chat/completions",
        ]
        assert fleet.p.calls[-1].body["kv_transfer_params"]["remote_block_ids"] is None
        # The retry has a new id, so that the KV blocks of the failed attempt are not used for it.
        ids = [call.headers["X-Request-Id"] for call in fleet.p.calls]
        assert len({*ids}) == len(ids)
        assert (await figures(fleet))["failed"] == 1
        # The failure is not prefill's fault; it still reads blocks of another engine.
        assert not fleet.events.changes
        assert await talk.ask(LONG) != WRONG
        assert (await figures(fleet))["failed"] == 1
        assert len(turns.read) == 1


async def test_a_cooldown_applies_only_to_instances_with_unreadable_blocks(
    launch: Launch,
) -> None:
    turns = Turns()
    async with talking(launch, turns, decode=2) as fleet:
        talks = [Talk(fleet, name=str(number)) for number in range(6)]
        for talk in talks:
            await talk.ask(LONG)
        first, second = fleet.decode
        assert first.calls
        assert second.calls
        # Prefill notices a restarted engine only when a read fails, and each turn uses up its
        # entry.
        turns.engines[first.version].expired = True
        dead, well = len(first.calls), len(second.calls)
        for talk in talks:
            assert await talk.ask(LONG) != WRONG
        assert len(turns.read) == well
        assert (await figures(fleet)) == {
            "hit": well,
            "miss": 6,
            "stale": 0,
            "changed": 0,
            "failed": 1,
            "rested": dead - 1,
            "unknown": 0,
        }


async def test_a_prefill_that_waits_too_long_for_blocks_is_retried_without_them(
    launch: Launch,
) -> None:
    turns = Turns()
    async with talking(launch, turns, prefill_timeout_s=2.0, on_prefill_failure="fail") as fleet:
        talk = Talk(fleet)
        await talk.ask(LONG)
        computes = fleet.p.chat

        async def waits(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            """Hang on read requests, as an engine without `bidirectional_kv_xfer` does."""
            reads = (body.get("kv_transfer_params") or {}).get("remote_block_ids")
            return await (hangs if reads else computes)(request, body)

        fleet.p.chat = waits
        with capture_logs() as lines:
            assert await talk.ask(LONG) != WRONG
            assert fleet.p.aborted == 1
            assert await talk.ask(LONG) != WRONG
        assert fleet.p.aborted == 1
        counts = await figures(fleet)
        assert (counts["failed"], counts["rested"]) == (1, 1)
        [warning] = [line for line in lines if line["event"].startswith("a prefill instance")]
        assert warning["instance"] == fleet.p.url
        assert warning["rest_s"] == 600
        assert "bidirectional_kv_xfer" in warning["next"]


async def test_blocks_are_read_once_for_any_later_behaviour_of_decode(launch: Launch) -> None:
    turns = Turns()
    async with talking(launch, turns, decode=2) as fleet:
        talk = Talk(fleet)
        await talk.ask(LONG)
        for one in fleet.decode:
            one.chat = fails_first(1, drops, one.chat)
        assert await talk.ask(LONG) != WRONG
        assert len(turns.read) == 1


@pytest.mark.parametrize("status", [400, 429, 503])
async def test_a_prefill_that_has_not_tried_to_read_reads_the_next_conversations_blocks(
    launch: Launch, status: int
) -> None:
    turns = Turns()
    async with talking(launch, turns) as fleet:
        refused, talk = Talk(fleet, name="refused"), Talk(fleet)
        await refused.ask(LONG)
        await talk.ask(LONG)
        computes = fleet.p.chat

        async def refuses_chat(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            told = request.path != "/tokenize"
            return await (refuses(status, "not this") if told else computes)(request, body)

        fleet.p.chat = refuses_chat
        body = {"model": "m", "messages": [*refused.history, *refused.history[:1]]}
        await fleet.chat({**body, "conversation_id": "refused"})
        assert (await figures(fleet))["failed"] == 1
        fleet.p.chat = computes
        assert await talk.ask(LONG) != WRONG
        assert len(turns.read) == 1


@pytest.mark.parametrize(("fault", "dies"), [(refuses(404), False), (drops, True)])
async def test_a_turn_is_computed_if_its_prompt_cannot_be_tokenized(
    launch: Launch, fault: Handler, dies: bool
) -> None:
    turns = Turns()
    async with talking(launch, turns, prefill=2) as fleet:
        talk = Talk(fleet)
        await talk.ask(LONG)
        [first] = [instance for instance in fleet.prefill if instance.calls]
        computes = first.chat

        async def chat(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            asked = fault if request.path == "/tokenize" else computes
            return await asked(request, body)

        first.chat = chat
        assert await talk.ask(LONG) != WRONG
        assert not turns.read
        paths = [call.path for call in first.calls[1:]]
        assert paths[0] == "/tokenize"
        assert (paths[-1] == "/tokenize") is dies  # the other instance prefills


async def test_a_client_that_leaves_leaves_nothing(launch: Launch) -> None:
    turns = Turns()
    async with talking(launch, turns) as fleet:
        talk = Talk(fleet, stream=True)
        await talk.ask(LONG)
        turns.answers = lambda _: "a very long answer " * 10_000
        body = {"model": "m", "messages": talk.history, "stream": True, "conversation_id": "talk"}
        async with fleet.post(body) as reply:
            await reply.content.readany()
        await until(lambda: len(fleet.events.requests) == 2)
        assert fleet.events.requests[-1].status == 499
        assert entries(fleet)[0] == 0


async def test_concurrent_turns_read_the_blocks_once(launch: Launch) -> None:
    turns = Turns()
    async with talking(launch, turns) as fleet:
        talks = [Talk(fleet, name=str(number)) for number in range(5)]
        for talk in talks:
            await talk.ask(LONG + talk.name * 9)
        again = [Talk(fleet, name=one.name, history=[*one.history]) for one in talks for _ in "ab"]
        assert WRONG not in await asyncio.gather(*(one.ask(LONG) for one in again))
        assert len(turns.read) == 5
        assert entries(fleet)[0] == 5


async def test_streams_without_block_parameters_are_answered_and_routed_alike(
    launch: Launch,
) -> None:
    turns = Turns()
    turns.streams_params = False
    async with talking(launch, turns, prefill=2, decode=2) as fleet:
        talk = Talk(fleet, stream=True)
        for number in range(3):
            await talk.ask(LONG + str(number))
        assert not turns.read
        assert (await figures(fleet))["miss"] == 3
        assert sorted(len(one.calls) for one in fleet.decode) == [0, 3]
        assert sorted(len(one.calls) for one in fleet.prefill) == [0, 3]


async def test_two_proxies_share_conversations_in_redis(launch: Launch, tmp_path: Path) -> None:
    turns = Turns()
    with RedisServer(tmp_path / "redis") as server:
        shared: dict[str, Any] = {
            "conversation_store": server.url("key=ours"),
            "key_secret": SecretStr("a secret of the proxies"),
        }
        async with talking(launch, turns, **shared) as one:
            urls: dict[str, Any] = {
                "prefill_servers_urls": (one.p.url,),
                "decode_servers_urls": (one.d.url,),
                "conversation_budget_s": BUDGET_S,
            }
            async with launch(**urls, **shared) as other:
                talk = Talk(one)
                for fleet in (one, other, one, other):
                    talk.fleet = fleet
                    assert await talk.ask(LONG) != WRONG
                assert len(turns.read) == 3
                assert entries(one) == (None, 0)
                [key] = server.command("KEYS", "*")
                assert key.startswith(b"ours:")
                assert b"talk" not in key
                entry = parse_entry(server.command("GET", key.decode()))
                assert entry is not None
                assert entry.blocks is not None
                # A guess of the conversation does not match the stored tokens.
                guess = [ord(one) for one in rendered({"messages": talk.history})]
                assert entry.blocks.tokens.shared_prefix_len(guess) == 0
                # An entry that the proxy cannot read, as of another version, counts as a miss.
                server.command("SET", key.decode(), '{"stored_s": "soon"}')
                assert await talk.ask(LONG) != WRONG
                assert len(turns.read) == 3


async def test_turns_are_answered_without_the_redis_of_conversations(
    launch: Launch, tmp_path: Path
) -> None:
    turns = Turns()
    with RedisServer(tmp_path / "redis") as server:
        async with talking(launch, turns, conversation_store=server.url()) as fleet:
            talk = Talk(fleet)
            await talk.ask(LONG)
            await talk.ask(LONG)
            server.kill()
            for _ in range(3):
                assert await talk.ask(LONG) != WRONG
            assert len(turns.read) == 1
            assert (await figures(fleet))["unknown"] == 3


async def test_workers_without_a_shared_conversation_store_warn_once(launch: Launch) -> None:
    turns = Turns()
    async with talking(launch, turns, workers=2) as fleet:
        with capture_logs() as lines:
            for number in range(2):
                await Talk(fleet, name=str(number)).ask(LONG)
        [warning] = [line for line in lines if "keeps conversations" in line["event"]]
        assert warning["log_level"] == "warning"


async def test_turns_stay_at_one_instance_without_a_prefill_stage(launch: Launch) -> None:
    async with launch(decode=2) as fleet:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        for _ in range(4):
            status, _ = await fleet.chat(body | {"conversation_id": "c"})
            assert status == 200
        assert sorted(len(one.calls) for one in fleet.decode) == [0, 4]
        assert not any("return_token_ids" in call.body for call in fleet.decode[0].calls)
