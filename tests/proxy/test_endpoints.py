"""Endpoints other than chat: requests to instances, and answers to official clients."""

import asyncio
from io import BytesIO
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from epd.api.endpoints import ENDPOINTS
from epd.version import __version__
from tests.proxy.endpoints import (
    GENERATES,
    PLAIN,
    WORDS,
    anthropic,
    ask,
    block,
    clients,
    linked,
    message,
    picture,
    response,
)
from tests.requests import text
from tests.support.fake_instance import (
    KV_PARAMS,
    OTHER_REPLIES,
    OTHER_STREAMS,
    STREAM,
    decodes,
    drops,
    fails_first,
    hangs,
    refuses,
    streams,
    streams_then,
)
from tests.support.fleet import Fleet, Launch, until

CHAT = "/v1/chat/completions"


def test_every_endpoint_is_asked_here() -> None:
    audio = {"/v1/audio/transcriptions", "/v1/audio/translations"}

    assert {*PLAIN, *audio} == ENDPOINTS.keys()


@pytest.mark.parametrize("path", PLAIN)
async def test_answers_of_decode_are_relayed_unchanged(fleet: Fleet, path: str) -> None:
    status, reply = await ask(fleet, path, PLAIN[path] | {"model": "m", "seed": 1})

    assert status == 200
    assert reply == OTHER_REPLIES.get(path, reply)
    [call] = fleet.d.calls
    assert (call.path, call.body["seed"]) == (path, 1)


@pytest.mark.parametrize("path", GENERATES)
async def test_answers_of_tokens_begin_with_a_prefill(fleet: Fleet, path: str) -> None:
    await ask(fleet, path, PLAIN[path])

    [prefill], [decode] = fleet.p.calls, fleet.d.calls
    assert prefill.path == decode.path == path
    assert prefill.body[ENDPOINTS[path].limits[0]] == 1
    assert prefill.body["stream"] is False
    assert decode.body["kv_transfer_params"] == KV_PARAMS


@pytest.mark.parametrize("path", sorted(PLAIN.keys() - set(GENERATES)))
async def test_endpoints_without_generation_use_only_decode(fleet: Fleet, path: str) -> None:
    await ask(fleet, path, PLAIN[path])

    assert fleet.p.calls == fleet.e.calls == []
    assert fleet.events.requests[0].first_token_s is None


async def test_openais_client_completes_responds_and_embeds(fleet: Fleet) -> None:
    client, _ = clients(fleet)
    async with client:
        completion = await client.completions.create(model="m", prompt="hi")
        answer = await client.responses.create(**response(picture(), WORDS))
        # The client asks for base64 by default, which vLLM supports and the fake does not.
        vector = await client.embeddings.create(model="m", input="hi", encoding_format="float")
        heard = await client.audio.transcriptions.create(model="m", file=("a.wav", b"sound"))

    assert completion.choices[0].text == answer.output_text == heard.text == "aé"
    assert vector.data[0].embedding == [0.5, 0.25]


async def test_openais_client_streams(fleet: Fleet) -> None:
    client, _ = clients(fleet)
    async with client:
        pieces = await client.completions.create(model="m", prompt="hi", stream=True)
        assert [piece.choices[0].text async for piece in pieces] == ["aé"]
        events = [it async for it in await client.responses.create(**response(WORDS), stream=True)]

    assert [event.type for event in events][-1] == "response.completed"
    assert "".join(it.delta for it in events if it.type == "response.output_text.delta") == "aé"


async def test_anthropics_client_asks_counts_and_streams(fleet: Fleet) -> None:
    _, client = clients(fleet)
    asked = message(block(), text())
    async with client:
        answer = await client.messages.create(**asked)
        limit = asked.pop("max_tokens")
        count = await client.messages.count_tokens(**asked)
        events = await client.messages.create(**asked, max_tokens=limit, stream=True)
        said = [it.delta.text async for it in events if it.type == "content_block_delta"]

    assert answer.content[0].text == "".join(said) == "aé"
    assert count.input_tokens == 3


@pytest.mark.parametrize(("path", "events"), {CHAT: STREAM, **OTHER_STREAMS}.items())
async def test_a_stream_reaches_the_client_byte_for_byte(
    fleet: Fleet, path: str, events: list[bytes]
) -> None:
    async with fleet.http.post(fleet.url + path, json=PLAIN[path] | {"stream": True}) as reply:
        assert await reply.read() == b"".join(events)
        assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"


@pytest.mark.fault(39)
@pytest.mark.parametrize("path", OTHER_STREAMS)
async def test_a_streams_first_token_is_timed_and_its_model_named(fleet: Fleet, path: str) -> None:
    body = PLAIN[path] | {"model": "alias", "stream": True}
    async with fleet.http.post(fleet.url + path, json=body) as reply:
        await reply.read()

    [event] = fleet.events.requests
    assert event.first_token_s is not None
    assert event.model_name == "m"


async def test_a_response_has_no_first_token_before_its_engine_begins_with_it(fleet: Fleet) -> None:
    begins = OTHER_STREAMS["/v1/responses"][:2]

    fleet.d.chat = streams_then(*begins, then=hangs)
    body = PLAIN["/v1/responses"] | {"model": "m", "stream": True}
    async with fleet.http.post(f"{fleet.url}/v1/responses", json=body) as reply:
        assert await reply.content.readexactly(len(b"".join(begins))) == b"".join(begins)
    await until(lambda: fleet.events.requests)

    [event] = fleet.events.requests
    assert (event.status, event.at, event.model_name) == (499, "answer", "m")
    assert event.first_token_s is event.kv_wait_s is None


async def test_a_response_that_breaks_off_is_an_error_for_openais_client(fleet: Fleet) -> None:
    fleet.d.chat = streams(OTHER_STREAMS["/v1/responses"][:-1])
    client, _ = clients(fleet)
    async with client:
        events = await client.responses.create(**response(WORDS), stream=True)
        with pytest.raises(openai.APIError) as broken:
            [event async for event in events]

    assert "before its last event" in broken.value.message


@pytest.mark.fault(39)
async def test_a_message_that_breaks_off_is_an_error_for_anthropics_client(fleet: Fleet) -> None:
    fleet.d.chat = streams(OTHER_STREAMS["/v1/messages"][:-1])
    _, client = clients(fleet)
    async with client:
        events = await client.messages.create(**message(text()), stream=True)
        with pytest.raises(anthropic().APIStatusError) as broken:
            [event async for event in events]

    assert isinstance(broken.value.body, dict)
    assert broken.value.body["error"]["type"] == "api_error"


async def test_errors_of_anthropics_endpoint_are_in_its_shape(fleet: Fleet) -> None:
    fleet.d.chat = refuses(400, "too long")
    said = [
        await ask(fleet, "/v1/messages", message(text())),
        await ask(fleet, "/v1/messages", {"messages": 1}),
        await ask(fleet, "/v1/messages", message(linked("ftp://a/b"))),
    ]

    assert [status for status, _ in said] == [400, 400, 400]
    assert {body["type"] for _, body in said} == {"error"}
    assert {body["error"]["type"] for _, body in said} == {"invalid_request_error"}
    assert "too long" in said[0][1]["error"]["message"]
    assert "messages[0].content[0].source" in said[2][1]["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("DELETE", "/v1/messages/count_tokens", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("POST", "/v1/messages/", 404, "not_found_error"),
        ("POST", "/v1/message", 404, "NotFoundError"),
        ("GET", "/v1/completions", 405, "BadRequestError"),
    ],
)
async def test_an_unknown_route_gets_an_error_of_the_api_above_it(
    fleet: Fleet, method: str, path: str, status: int, kind: str
) -> None:
    async with fleet.http.request(method, fleet.url + path) as reply:
        said = await reply.json()

    assert reply.status == status
    assert said["error"]["type"] == kind
    # The field of Anthropic's error shape.
    assert said.get("type") == ("error" if kind.islower() else None)


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/embeddings", "/tokenize", "/v1/audio/translations"]
)
async def test_passthrough_requests_need_a_slot(launch: Launch, path: str) -> None:
    async with launch(max_requests=1, max_queue=0) as fleet:
        fleet.d.chat = hangs
        first = asyncio.create_task(ask(fleet, "/v1/completions", {"prompt": "a"}))
        await until(lambda: fleet.d.calls)
        form = aiohttp.FormData({"file": BytesIO(b"sound")})
        sent: dict[str, Any] = {"data": form} if "audio" in path else {"json": PLAIN[path]}
        async with fleet.http.post(fleet.url + path, **sent) as reply:
            assert reply.status == 429
        first.cancel()
        await asyncio.wait([first])


@pytest.mark.fault(34)
@pytest.mark.parametrize("path", PLAIN)
async def test_passthrough_requests_are_retried_on_another_instance(
    launch: Launch, path: str
) -> None:
    async with launch(decode=2) as fleet:
        for instance in fleet.decode:
            instance.chat = fails_first(1, drops, decodes)
        fleet.decode[1].chat = decodes
        statuses = {(await ask(fleet, path, PLAIN[path]))[0] for _ in range(2)}

        assert statuses == {200}


async def test_the_version_is_that_of_the_proxy(fleet: Fleet) -> None:
    async with fleet.http.get(f"{fleet.url}/version") as reply:
        assert await reply.json() == {"version": __version__}


async def test_embeddings_as_bytes_keep_their_metadata_header(fleet: Fleet) -> None:
    async def encoded(_: web.Request, __: dict[str, Any]) -> web.Response:
        headers = {"Content-Type": "application/octet-stream", "metadata": '{"data": []}'}
        return web.Response(body=b"\0\x80", headers=headers)

    fleet.d.chat = encoded
    body = {"input": "hi", "encoding_format": "bytes"}
    async with fleet.http.post(f"{fleet.url}/v1/embeddings", json=body) as reply:
        assert (await reply.read(), reply.headers["metadata"]) == (b"\0\x80", '{"data": []}')


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/responses/r"), ("POST", "/v1/responses/r/cancel")]
)
async def test_responses_are_not_kept_after_they_were_sent(
    fleet: Fleet, method: str, path: str
) -> None:
    async with fleet.http.request(method, fleet.url + path) as reply:
        error = (await reply.json())["error"]

    assert (error["code"], reply.headers["x-epd-error"]) == (404, "unsupported_route")
    assert "not kept" in error["message"]
