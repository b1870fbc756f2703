"""Conversations over real sockets: prefill reads what decode holds of the last turn."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.proxy.clients import ALICE, BOB, bearer
from tests.proxy.fake_instance import FakeInstance, drops, fails_first, refuses
from tests.proxy.fake_turns import PICTURE, WRONG, Turns, rendered
from tests.proxy.fleet import Fleet, Launch, until
from tests.requests import image
from tests.store.redis_server import RedisServer

BUDGET_S = 5.0
"""What is found does not depend on how fast a busy machine looks."""


@asynccontextmanager
async def talking(
    launch: Launch, turns: Turns, prefill: int = 1, decode: int = 1, **config: Any
) -> AsyncIterator[Fleet]:
    config = {"conversation_budget_s": BUDGET_S, **config}
    async with launch(encode=1, prefill=prefill, decode=decode, **config) as fleet:
        for instance in fleet.prefill:
            turns.start(instance, decode=False)
        for instance in fleet.decode:
            turns.start(instance, decode=True)
        yield fleet


@dataclass
class Talk:
    """A client that sends its whole history each time."""

    fleet: Fleet
    name: str | None = "talk"
    stream: bool = False
    headers: dict[str, str] | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)

    async def ask(self, content: Any, **more: Any) -> str:
        """The answer's text, once it is in the history."""
        self.history.append({"role": "user", "content": content})
        body = {"model": "m", "messages": self.history, "stream": self.stream, **self.more, **more}
        if self.name is not None:
            body["conversation_id"] = self.name
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


async def health(fleet: Fleet) -> dict[str, Any]:
    async with fleet.http.get(fleet.url + "/health") as reply:
        return dict((await reply.json())["conversations"])


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
                # All but the token that was sampled last and the mark behind it.
                assert turns.read[-1] == len(before) - 2
        assert len(turns.read) == 4
        assert (await figures(fleet)) == {
            "hit": 4,
            "miss": 1,
            "stale": 0,
            "changed": 0,
            "failed": 0,
            "unknown": 0,
        }
        assert await health(fleet) == {"kept": 1, "evicted": 0}
        # The same ones each time.
        assert sorted(len(one.calls) > 0 for one in fleet.prefill) == [False] * (prefill - 1) + [
            True
        ]
        assert sorted(len(one.calls) > 0 for one in fleet.decode) == [False] * (decode - 1) + [True]
