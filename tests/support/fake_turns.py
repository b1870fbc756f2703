"""Fake prefill and decode instances that hold KV blocks, and read each other's as NIXL does.

The tokens of a prompt are the characters that a small chat template makes of it. A block contains
the tokens that it was computed from. An instance that reads the wrong blocks gives a wrong answer,
as vLLM does.
"""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.support.fake_instance import FakeInstance, page, streams

BLOCK = 16
PICTURE = "\ufffc" * 40
ENDED = "\x03"
WRONG = "read from the wrong blocks"

Body = dict[str, Any]
Answers = Callable[[Body], str]


def rendered(body: Body, keep: Callable[[str], str] = str) -> str:
    """Return the prompt of a chat or of a completion.

    Args:
        body: body of the request.
        keep: returns the part of an earlier answer that the template keeps in the prompt.
    """
    if "messages" not in body:
        prompt = body["prompt"]
        return prompt if isinstance(prompt, str) else "".join(map(chr, prompt))
    system = json.dumps(body["tools"]) if "tools" in body else ""
    turns = [
        f"<{one['role']}>{keep(_words(one)) if one['role'] == 'assistant' else _words(one)}{ENDED}"
        for one in body["messages"]
    ]
    return system + "".join(turns) + "<assistant>"


def _words(message: Body) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", PICTURE) for part in content)


def says(body: Body) -> str:
    """Return an answer that depends on the whole prompt."""
    return f"what {len(rendered(body))} characters ask for, " + "at some length " * 6


@dataclass
class Engine:
    """KV blocks of one instance.

    Attributes:
        name: engine id; each start gets a new one.
        blocks: tokens by block number.
        expired: whether its blocks are gone.
    """

    name: str
    blocks: dict[int, str] = field(default_factory=dict)
    expired: bool = False


class Turns:
    """Handlers for the prefill and decode instances of a fleet.

    Attributes:
        engines: engines by id.
        read: number of tokens read, for each prefill that read blocks.
        streams_params: whether the last chunk of a stream has `kv_transfer_params`, as since 0.33.
        answers: returns decode's answer.
        keep: returns the part of an earlier answer that the template keeps in the prompt.
    """

    def __init__(self, answers: Answers = says) -> None:
        self.engines: dict[str, Engine] = {}
        self.read: list[int] = []
        self.streams_params = True
        self.answers = answers
        self.keep: Callable[[str], str] = str
        self.host = "localhost"
        self._ids = itertools.count(1)
        self._names = itertools.count(1)

    def start(self, instance: FakeInstance, *, decode: bool) -> None:
        """Make an instance a new engine of the fleet."""
        engine = Engine(f"engine-{next(self._names)}")
        self.engines[engine.name] = engine
        gauges = (
            f'vllm:cache_config_info{{block_size="{BLOCK}",engine="0"}} 1.0',
            'vllm:num_requests_running{engine="0"} 0.0',
            'vllm:num_requests_waiting{engine="0"} 0.0',
        )
        instance.metrics = page("".join(f"{line}\n" for line in gauges))
        instance.version = engine.name

        async def chat(request: web.Request, body: Body) -> web.StreamResponse:
            if request.path == "/tokenize":
                tokens = [ord(one) for one in rendered(body, self.keep)]
                return web.json_response({"tokens": tokens, "count": len(tokens)})
            return await (self._decodes if decode else self._prefills)(engine, request, body)

        instance.chat = chat

    async def _prefills(
        self, engine: Engine, request: web.Request, body: Body
    ) -> web.StreamResponse:
        params, prompt = body["kv_transfer_params"], rendered(body, self.keep)
        assert params["do_remote_decode"] is True
        assert params["do_remote_prefill"] is False
        assert "conversation_id" not in body
        computed = prompt
        if params["remote_block_ids"]:
            found = self._pulled(params, len(prompt))
            if found is None:
                return web.json_response({"error": {"message": "EngineCore"}}, status=500)
            self.read.append(len(found))
            computed = found + prompt[len(found) :]
        return web.json_response(
            {"choices": [], "kv_transfer_params": self._hold(engine, computed, decode=False)}
        )

    async def _decodes(
        self, engine: Engine, request: web.Request, body: Body
    ) -> web.StreamResponse:
        assert "conversation_id" not in body
        prompt, params, said = rendered(body, self.keep), body.get("kv_transfer_params"), None
        answer = self.answers(body)
        if params:
            assert params["do_remote_prefill"] is True
            if self._pulled(params, len(prompt)) != prompt:
                answer = WRONG
            said = self._hold(engine, prompt + answer, decode=True)
        asked = bool(body.get("return_token_ids"))
        chat = "messages" in body
        if not body.get("stream"):
            return web.json_response(_reply(prompt, answer, said, asked=asked, chat=chat))
        said = said if self.streams_params else None
        events = _events(prompt, answer, said, asked=asked, chat=chat)
        lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
        return await streams([*lines, b"data: [DONE]\n\n"])(request, body)

    def _hold(self, engine: Engine, tokens: str, *, decode: bool) -> Body:
        """Keep blocks of these tokens. Decode has sampled its last token, but not computed it."""
        held = tokens[:-1] if decode else tokens
        numbers = [next(self._ids) for _ in range(0, len(held), BLOCK)]
        for place, number in enumerate(numbers):
            engine.blocks[number] = held[place * BLOCK : (place + 1) * BLOCK]
        return {
            "do_remote_prefill": not decode,
            "do_remote_decode": decode,
            "remote_block_ids": [numbers],
            "remote_engine_id": engine.name,
            "remote_request_id": f"chatcmpl-{numbers[0]}",
            "remote_host": self.host,
            "remote_port": 5600,
            "tp_size": 1,
            "remote_num_tokens": len(held),
            "remote_blocks_expiry_time": 1.5 if decode else None,
            "transfer_mode": "pull",
        }

    def _pulled(self, params: Body, most: int) -> str | None:
        """Return the content of the blocks to read, or None if they cannot be read."""
        engine = self.engines.get(params["remote_engine_id"])
        if engine is None or engine.expired:
            return None
        count = min(params["remote_num_tokens"], most)
        # vLLM pairs the lists from the end: a list that is too long is read at the wrong place.
        numbers = params["remote_block_ids"][0][-math.ceil(count / BLOCK) :]
        return "".join(engine.blocks.pop(number) for number in numbers)[:count]


def _reply(prompt: str, answer: str, said: Body | None, *, asked: bool, chat: bool) -> Body:
    tokens = {"token_ids": [ord(one) for one in answer] if asked else None}
    prompt_tokens = {"prompt_token_ids": [ord(one) for one in prompt] if asked else None}
    words = {"message": {"role": "assistant", "content": answer}} if chat else {"text": answer}
    choice = {"index": 0, **words, "logprobs": None, "finish_reason": "stop", **tokens}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(answer)}
    return {
        "id": "c",
        "model": "m",
        "choices": [choice if chat else {**choice, **prompt_tokens}],
        "usage": usage,
        **(prompt_tokens if chat else {}),
        "kv_transfer_params": said,
    }


def _events(prompt: str, answer: str, said: Body | None, *, asked: bool, chat: bool) -> list[Body]:
    """Return events as of vLLM 0.33: the first has the prompt's tokens, the last the parameters."""
    pieces: list[str] = [answer[at : at + 7] for at in range(0, len(answer), 7)]
    events: list[Body] = []
    for number, piece in enumerate(pieces):
        last = number == len(pieces) - 1
        words = {"delta": {"content": piece}} if chat else {"text": piece}
        tokens = {"token_ids": [ord(one) for one in piece] if asked else None}
        finish = {"finish_reason": "stop" if last else None}
        event: Body = {
            "id": "c",
            "model": "m",
            "choices": [{"index": 0, **words, **finish, **tokens}],
        }
        if not number and asked:
            event["prompt_token_ids"] = [ord(one) for one in prompt]
        events.append({**event, "kv_transfer_params": said} if last and said else event)
    return events
