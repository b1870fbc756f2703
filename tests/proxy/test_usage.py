"""Usage of the prefix cache in answers of fleets with a prefill stage."""

import json
from typing import Any

import pytest
from aiohttp import web

from epd.request.stages import WHOLE_BYTES
from tests.requests import text
from tests.support.fake_instance import KV_PARAMS, Handler, refuses, streams
from tests.support.fleet import Fleet, Launch

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PATHS = (CHAT, RESPONSES, MESSAGES)
SAID = '{"usage":{"input_tokens":257,"created_cache_tokens":0,"cache_write_tokens":0}}'
"""Text of a model that imitates the fields."""

START = {"input_tokens": 257, "output_tokens": 0}
"""Usage in the first event of messages, which has no numbers of the prefix cache."""

REQUESTS: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": [text()]}]},
    RESPONSES: {"model": "m", "input": "hi"},
    MESSAGES: {
        "model": "m",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": [text()]}],
    },
}


def usage(path: str, written: int) -> dict[str, Any]:
    """Return vLLM's usage of a prompt of 257 tokens, some of them written to the prefix cache."""
    if path == CHAT:
        details = {"cached_tokens": 0, "created_cache_tokens": written, "multimodal_tokens": None}
        return {"prompt_tokens": 257, "completion_tokens": 1, "prompt_tokens_details": details}
    if path == RESPONSES:
        details = {"cached_tokens": 0, "cache_write_tokens": written}
        return {"input_tokens": 257, "input_tokens_details": details, "output_tokens": 1}
    rest = {"input_tokens": 257 - written, "output_tokens": 1}
    return {**rest, "cache_creation_input_tokens": written, "cache_read_input_tokens": 0}


def written(path: str, written: int) -> dict[str, Any]:
    """Return an answer with this usage, after a text and an argument that imitate it."""
    said = {"text": SAID, "input": {"usage": {"input_tokens": 1}}}
    return {"id": "a", "content": [said], "usage": usage(path, written)}


def prefilling(count: int) -> Handler:
    async def chat(http: web.Request, _: dict[str, Any]) -> web.Response:
        return web.json_response({**written(http.path, count), "kv_transfer_params": KV_PARAMS})

    return chat


async def decoding(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answer as decode does after a prefill: it has written nothing."""
    answer = written(http.path, 0)
    if not body.get("stream"):
        return web.json_response(answer)
    if http.path == CHAT:
        done = [{"choices": [], "usage": None}, {"choices": [], "usage": answer["usage"]}]
        events = [b"data: %b\n\n" % json.dumps(event).encode() for event in done]
        return await streams([*events, b"data: [DONE]\n\n"])(http, body)
    names = {
        RESPONSES: ("response.created", "response.completed"),
        MESSAGES: ("message_start", "message_delta", "message_stop"),
    }[http.path]
    field = "response" if http.path == RESPONSES else "message"
    begun = {**answer, "usage": START} if http.path == MESSAGES else answer
    events = [
        f"event: {name}\ndata: {json.dumps({'type': name, field: one})}\n\n".encode()
        for name, one in zip(names, (begun, answer, answer), strict=False)
    ]
    return await streams(events)(http, body)


async def answer(fleet: Fleet, path: str, *, stream: bool) -> str:
    body = {**REQUESTS[path], "stream": stream}
    async with fleet.http.post(fleet.url + path, json=body) as reply:
        assert reply.status == 200
        return await reply.text()


def found(path: str, said: str) -> list[dict[str, Any]]:
    """Return the usage objects of an answer or of the events of a stream."""
    lines = [line.removeprefix("data: ") for line in said.splitlines() if '"usage": {' in line]
    objects = [json.loads(line) for line in lines]
    holders = [one.get("response") or one.get("message") or one for one in objects]
    assert all(holder["content"][0]["text"] == SAID for holder in holders if "content" in holder)
    return [holder["usage"] for holder in holders]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_written_to_the_prefix_cache_are_those_of_prefill(
    launch: Launch, path: str, stream: bool
) -> None:
    async with launch(prefill=1) as fleet:
        fleet.p.chat, fleet.d.chat = prefilling(256), decoding
        usages = found(path, await answer(fleet, path, stream=stream))

    first = [START] if stream and path == MESSAGES else [usage(path, 256)]
    assert usages[:1] == first
    assert all(found == usage(path, 256) for found in usages[1:])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_usage_of_decode_alone_is_unchanged(launch: Launch, path: str, stream: bool) -> None:
    async with launch(prefill=2) as fleet:
        for instance in fleet.prefill:
            instance.chat = refuses(502)
        fleet.d.chat = decoding
        usages = found(path, await answer(fleet, path, stream=stream))

    assert usages[-1] == usage(path, 0)


@pytest.mark.parametrize("path", PATHS)
async def test_usage_in_an_answer_that_is_too_large_to_be_held_is_that_of_prefill(
    launch: Launch, path: str
) -> None:
    async def large(http: web.Request, _: dict[str, Any]) -> web.Response:
        return web.json_response({**before, **written(http.path, 0), **after})

    before, after = {"logprobs": "a" * 3 * WHOLE_BYTES}, {"kv_transfer_params": "b" * 4096}

    async with launch(prefill=1) as fleet:
        fleet.p.chat, fleet.d.chat = prefilling(256), large
        said = json.loads(await answer(fleet, path, stream=False))

    assert said == {**before, **written(path, 256), **after}
