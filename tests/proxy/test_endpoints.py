"""The endpoints beside chat: what instances are sent, and what official clients get."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from aiohttp import web

from epd.bodies.endpoints import ENDPOINTS
from epd.bodies.forms import read_form
from epd.version import __version__
from tests.proxy.backed import Backed, caching
from tests.proxy.clients import ALICE, BOB, bearer
from tests.proxy.fake_instance import (
    KV_PARAMS,
    OTHER_REPLIES,
    OTHER_STREAMS,
    RANKINGS,
    SCORES,
    decodes,
    drops,
    fails_first,
    hangs,
    refuses,
    streams,
)
from tests.proxy.fake_origin import FakeOrigin
from tests.proxy.fleet import Fleet, Launch, until
from tests.requests import data_url, image, text

URL = data_url(b"picture")
DATA = URL.partition(",")[2]
WORDS = {"type": "input_text", "text": "?"}


def picture(url: str = URL, **more: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, **more}


def response(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "input": [{"role": "user", "content": list(parts)}], **more}


def block(data: str = DATA) -> dict[str, Any]:
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": data},
    }


def linked(url: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "url", "url": url}}


def message(*blocks: Any, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": list(blocks)}]
    return {"model": "m", "max_tokens": 5, "messages": messages, **more}


def chat(part: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": [part]}], **more}


def seen(url: str) -> dict[str, Any]:
    return {"content": [image(url)]}


def content_of(body: dict[str, Any]) -> list[Any]:
    """The content that a request of `WITH_MEDIA` has its picture in."""
    for field in ("messages", "input", "documents", "query", "inputs"):
        value = body.get(field)
        one = value[0] if isinstance(value, list) else value
        if isinstance(one, dict):
            content: list[Any] = one["content"]
            return content
    raise AssertionError(body)


WITH_MEDIA: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda url: chat(image(url)),
    "/v1/responses": lambda url: response(picture(url)),
    "/v1/messages": lambda url: message(linked(url)),
    "/v1/messages/count_tokens": lambda url: message(linked(url)),
    "/v1/embeddings": lambda url: chat(image(url)),
    "/tokenize": lambda url: chat(image(url)),
    **dict.fromkeys(("/pooling", "/classify"), lambda url: chat(image(url))),
    **dict.fromkeys(SCORES, lambda url: {"queries": "a", "documents": seen(url)}),
    **dict.fromkeys(RANKINGS, lambda url: {"query": seen(url), "documents": ["a"]}),
    "/v2/embed": lambda url: {"inputs": [seen(url)]},
}
"""A request with a picture, for every endpoint that can carry one."""
with_media = pytest.mark.parametrize("path", WITH_MEDIA)

PLAIN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/embeddings": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
    **{path: {"queries": "a", "documents": ["b"]} for path in SCORES},
    **{path: {"query": "a", "documents": ["b"]} for path in RANKINGS},
    "/pooling": {"input": "hi"},
    "/classify": {"input": "hi"},
    "/v2/embed": {"texts": ["hi"]},
}
SALTED = [path for path in PLAIN if ENDPOINTS[path].salted]


async def ask(
    fleet: Fleet, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    async with fleet.http.post(fleet.url + path, json=body, headers=headers) as reply:
        return reply.status, await reply.json(content_type="application/json")


@pytest.fixture
async def fleet(launch: Launch) -> AsyncIterator[Fleet]:
    async with launch(prefill=1) as running:
        yield running


def clients(fleet: Fleet) -> tuple[openai.AsyncOpenAI, anthropic.AsyncAnthropic]:
    return (
        openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="k", max_retries=0),
        anthropic.AsyncAnthropic(base_url=fleet.url, api_key="k", max_retries=0),
    )


def test_every_endpoint_is_asked_here() -> None:
    audio = {"/v1/audio/transcriptions", "/v1/audio/translations"}

    assert {*PLAIN, *audio} == ENDPOINTS.keys()


@pytest.mark.parametrize("path", PLAIN)
async def test_decodes_answer_comes_as_it_is(fleet: Fleet, path: str) -> None:
    status, reply = await ask(fleet, path, PLAIN[path] | {"model": "m", "seed": 1})

    assert status == 200
    assert reply == OTHER_REPLIES.get(path, reply)
    [call] = fleet.d.calls
    assert (call.path, call.body["seed"]) == (path, 1)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_decode_gets_the_operators_stream_interval(launch: Launch, path: str) -> None:
    async with launch(stream_interval=4) as fleet:
        for own in ({}, {"stream_interval": 2}):
            body = {**PLAIN[path], "stream": True, **own}
            async with fleet.http.post(fleet.url + path, json=body) as reply:
                assert reply.status == 200
                await reply.read()

    assert [call.body["stream_interval"] for call in fleet.d.calls] == [4, 2]


GENERATES = [path for path in PLAIN if ENDPOINTS[path].generates]


@pytest.mark.parametrize("path", GENERATES)
async def test_answers_of_tokens_begin_with_a_prefill(fleet: Fleet, path: str) -> None:
    await ask(fleet, path, PLAIN[path])

    [prefill], [decode] = fleet.p.calls, fleet.d.calls
    assert prefill.path == decode.path == path
    assert prefill.body[ENDPOINTS[path].limits[0]] == 1
    assert prefill.body["stream"] is False
    assert decode.body["kv_transfer_params"] == KV_PARAMS


@pytest.mark.parametrize("path", sorted(PLAIN.keys() - set(GENERATES)))
async def test_others_are_decodes_alone(fleet: Fleet, path: str) -> None:
    await ask(fleet, path, PLAIN[path])

    assert fleet.p.calls == fleet.e.calls == []
    assert fleet.events.requests[0].first_token_s is None


async def test_prompts_of_a_batch_are_decodes_alone(fleet: Fleet) -> None:
    assert (await ask(fleet, "/v1/completions", {"prompt": ["a", "b"]}))[0] == 200
    assert fleet.p.calls == []
    assert "kv_transfer_params" not in fleet.d.calls[0].body


async def test_openais_client_completes_responds_and_embeds(fleet: Fleet) -> None:
    client, _ = clients(fleet)
    async with client:
        completion = await client.completions.create(model="m", prompt="hi")
        answer = await client.responses.create(**response(picture(), WORDS))
        # What its client asks for by default is what vLLM encodes; the fake does not.
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


@pytest.mark.parametrize("path", OTHER_STREAMS)
async def test_a_stream_comes_byte_by_byte(fleet: Fleet, path: str) -> None:
    async with fleet.http.post(fleet.url + path, json=PLAIN[path] | {"stream": True}) as reply:
        assert await reply.read() == b"".join(OTHER_STREAMS[path])


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

    async def waits(asked: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await streams(begins)(asked, body)
        return await hangs(asked, body)

    fleet.d.chat = waits
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

    assert "before its end" in broken.value.message


@pytest.mark.fault(39)
async def test_a_message_that_breaks_off_is_an_error_for_anthropics_client(fleet: Fleet) -> None:
    fleet.d.chat = streams(OTHER_STREAMS["/v1/messages"][:-1])
    _, client = clients(fleet)
    async with client:
        events = await client.messages.create(**message(text()), stream=True)
        with pytest.raises(anthropic.APIStatusError) as broken:
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
async def test_what_is_not_served_is_an_error_of_the_api_that_it_is_under(
    fleet: Fleet, method: str, path: str, status: int, kind: str
) -> None:
    async with fleet.http.request(method, fleet.url + path) as reply:
        said = await reply.json()

    assert reply.status == status
    assert said["error"]["type"] == kind
    assert said.get("type") == ("error" if kind.islower() else None)  # which is Anthropic's


async def test_a_picture_of_a_response_is_encoded_as_one_of_a_chat_is(fleet: Fleet) -> None:
    await ask(fleet, "/v1/responses", response(WORDS, picture()))
    await ask(fleet, "/v1/chat/completions", chat(image()))

    of_response, of_chat = fleet.e.calls
    assert of_response.path == "/v1/chat/completions"
    assert of_response.body == of_chat.body
    key = of_chat.parts[0]["uuid"]
    for instance in (fleet.p, fleet.d):
        [_, part] = instance.calls[0].body["input"][0]["content"]
        assert part == {
            "type": "input_image",
            "detail": "auto",
            "image_embeds": {"image_grid_thw": [1, 36, 54]},
            "uuid": key,
        }
        assert key in instance.calls[0].body["ec_transfer_params"]


async def test_a_picture_of_a_message_is_encoded_and_named_by_the_engines(fleet: Fleet) -> None:
    await ask(fleet, "/v1/messages", message(text(), block()))

    [encode] = fleet.e.calls
    assert encode.parts == [{"type": "image_url", "image_url": {"url": URL}}]
    for instance in (fleet.p, fleet.d):
        [_, part] = instance.calls[0].body["messages"][0]["content"]
        assert part == linked(URL)


async def test_a_picture_is_encoded_once_for_chat_and_responses(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url) as fleet:
        for path, body in (
            ("/v1/chat/completions", chat(image(URL))),
            ("/v1/responses", response(picture())),
            ("/v1/responses", response(picture(), WORDS)),
        ):
            assert (await ask(fleet, path, body))[0] == 200
            await asyncio.gather(*backed.writes)

        assert len(fleet.e.calls) == 1


async def test_a_picture_of_messages_is_encoded_once_while_the_store_has_it(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url) as fleet:
        for _ in range(3):
            assert (await ask(fleet, "/v1/messages", message(block())))[0] == 200
            await asyncio.gather(*backed.writes)
        assert len(fleet.e.calls) == 1

        await backed.forget()
        await ask(fleet, "/v1/messages", message(block()))
        assert len(fleet.e.calls) == 2


async def test_what_chat_made_of_a_picture_is_not_taken_for_what_a_message_finds(
    launch: Launch, backed: Backed, url: str
) -> None:
    """It is there under a key that no engine makes of the picture."""
    async with caching(launch, backed, url) as fleet:
        for path, body in (
            ("/v1/chat/completions", chat(image(URL))),
            ("/v1/messages", message(block())),
        ):
            await ask(fleet, path, body)
            await asyncio.gather(*backed.writes)

        assert len(fleet.e.calls) == 2


@pytest.mark.security("S11")
@pytest.mark.parametrize("path", [path for path in WITH_MEDIA if not ENDPOINTS[path].encodes])
async def test_media_that_are_passed_on_go_raw_and_under_our_key(fleet: Fleet, path: str) -> None:
    named = path not in {"/v1/messages/count_tokens", "/v2/embed"}
    body = WITH_MEDIA[path](URL)
    content_of(body)[0] |= {"uuid": "own"} if named else {}
    assert (await ask(fleet, path, body))[0] == 200

    assert fleet.e.calls == []
    [part] = content_of(fleet.d.calls[0].body)
    assert URL in json.dumps(part)
    assert ("uuid" in part) is named
    assert part.get("uuid", "key") != "own"
    assert fleet.events.requests[0].items == {}


@pytest.mark.security("S9")
@with_media
@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://a/b", "http://user@a/b", "https://a\\b/c", "x"]
)
async def test_no_endpoint_names_a_place_that_no_request_may_name(
    fleet: Fleet, path: str, url: str
) -> None:
    status, _ = await ask(fleet, path, WITH_MEDIA[path](url))

    assert status == 400
    assert fleet.e.calls == fleet.p.calls == fleet.d.calls == []


@pytest.mark.security("S7")
@with_media
async def test_no_endpoint_reaches_a_private_address(launch: Launch, path: str) -> None:
    async with launch(media_fetch="proxy", allowed_media_domains=("127.0.0.1",)) as fleet:
        status, _ = await ask(fleet, path, WITH_MEDIA[path]("https://127.0.0.1/a.png"))

        assert status == 400
        assert fleet.e.calls == fleet.d.calls == []


@pytest.mark.security("S10")
@with_media
async def test_no_endpoint_takes_more_items_than_there_may_be(launch: Launch, path: str) -> None:
    async with launch(max_items=1) as fleet:
        body = WITH_MEDIA[path](URL)
        content_of(body).extend(content_of(WITH_MEDIA[path](URL)))
        status, _ = await ask(fleet, path, body)

        assert status == 400
        assert fleet.d.calls == []


@pytest.mark.security("S11")
@pytest.mark.parametrize("path", [path for path in WITH_MEDIA if "messages" not in path])
async def test_no_endpoint_takes_an_output_for_its_media(fleet: Fleet, path: str) -> None:
    part = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 2, 2]}, "uuid": "k"}
    body = WITH_MEDIA[path](URL)
    content_of(body)[0] = part
    status, reply = await ask(fleet, path, body)

    assert status == 400
    assert reply["error"]["param"].endswith("content[0]")
    assert fleet.d.calls == []


@pytest.mark.security("S6")
@with_media
async def test_no_endpoint_takes_kwargs_that_are_not_trusted(fleet: Fleet, path: str) -> None:
    body = WITH_MEDIA[path](URL) | {"mm_processor_kwargs": {"max_pixels": 1}}
    await ask(fleet, path, body)

    assert all("mm_processor_kwargs" not in call.body for call in [*fleet.e.calls, *fleet.d.calls])


@pytest.mark.security("S1")
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_no_endpoint_answers_without_a_key(launch: Launch, keys: Path, path: str) -> None:
    async with launch(api_keys_file=keys) as fleet:
        for headers in ({}, bearer("wrong"), {"X-API-Key": "wrong"}):
            status, _ = await ask(fleet, path, PLAIN.get(path, {}), headers)
            assert status == 401
        assert fleet.d.calls == []


@pytest.mark.security("S12")
@pytest.mark.parametrize("path", SALTED)
async def test_each_tenant_has_salts_of_its_own(launch: Launch, keys: Path, path: str) -> None:
    async with launch(api_keys_file=keys) as fleet:
        for key in (ALICE, BOB, ALICE):
            assert (await ask(fleet, path, PLAIN[path], bearer(key)))[0] == 200

        first, second, third = (call.body["cache_salt"] for call in fleet.d.calls)
        assert first == third != second


@pytest.mark.security("S1")
async def test_anthropics_clients_present_their_key_in_a_header_of_its_own(
    launch: Launch, keys: Path
) -> None:
    async with launch(api_keys_file=keys) as fleet:
        asked = message(text())
        async with anthropic.AsyncAnthropic(base_url=fleet.url, api_key=ALICE) as client:
            assert (await client.messages.create(**asked)).id == "msg"
        both = {"X-API-Key": ALICE, **bearer("wrong")}
        assert (await ask(fleet, "/v1/messages", asked, both))[0] == 401
        assert {"x-api-key", "authorization"}.isdisjoint(
            name.lower() for name in fleet.d.calls[0].headers
        )


async def test_who_has_no_key_is_told_where_it_belongs(launch: Launch, keys: Path) -> None:
    async with launch(api_keys_file=keys) as fleet:
        _, chats = await ask(fleet, "/v1/chat/completions", PLAIN["/v1/chat/completions"])
        _, messages = await ask(fleet, "/v1/messages", PLAIN["/v1/messages"])

    assert chats["error"]["message"].endswith("Authorization: Bearer <key>")
    assert messages["error"]["message"].endswith("X-API-Key: <key>")


async def test_where_the_proxy_has_no_keys_the_instances_judge_anthropics(fleet: Fleet) -> None:
    await ask(fleet, "/v1/messages", message(text()), {"X-API-Key": "k"})

    assert fleet.d.calls[0].headers["Authorization"] == "Bearer k"


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/embeddings", "/tokenize", "/v1/audio/translations"]
)
async def test_there_must_be_a_place_for_what_is_passed_on(launch: Launch, path: str) -> None:
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


@pytest.mark.parametrize("kind", ["transcriptions", "translations"])
async def test_a_form_is_written_anew_for_decode(fleet: Fleet, kind: str) -> None:
    sound = b"\0\xff" * 100_000
    form = aiohttp.FormData({"model": "m", "chunking_strategy": "auto"})
    form.add_field("file", sound, filename="a.wav", content_type="audio/wav")
    async with fleet.http.post(f"{fleet.url}/v1/audio/{kind}", data=form) as reply:
        assert await reply.json() == {"text": "aé"}

    [call] = fleet.d.calls
    sent = {
        part.name: bytes(part.data)
        for part in read_form(call.body["form"], call.headers["Content-Type"])
    }
    assert sent == {"model": b"m", "file": sound}


@pytest.mark.fault(74)
@pytest.mark.security("S5")
@pytest.mark.parametrize("kind", ["transcriptions", "translations"])
@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("kv_transfer_params", "0", "kv_transfer_params"),
        ("ec_transfer_params", "[]", "ec_transfer_params"),
        ("vllm_xargs", '{"kv_transfer_params": ""}', "vllm_xargs.kv_transfer_params"),
        ("vllm_xargs", '{"ec_transfer_params": 1}', "vllm_xargs.ec_transfer_params"),
        ("vllm_xargs", "kv_transfer_params", "vllm_xargs"),
    ],
)
async def test_no_instance_gets_a_form_with_a_reserved_field(
    fleet: Fleet, kind: str, name: str, value: str, param: str
) -> None:
    form = aiohttp.FormData({"model": "m", name: value})
    form.add_field("file", b"sound", filename="a.wav")
    async with fleet.http.post(f"{fleet.url}/v1/audio/{kind}", data=form) as reply:
        error = (await reply.json())["error"]

    assert (reply.status, error["param"]) == (400, param)
    assert all(instance.calls == [] for instance in fleet.instances)


@pytest.mark.fault(74)
@pytest.mark.security("S5")
@pytest.mark.parametrize("path", PLAIN)
@pytest.mark.parametrize("value", ["null", '""', "0", "[]", "{}", '{"do_remote_prefill": true}'])
async def test_no_instance_gets_a_reserved_field_of_a_client(
    fleet: Fleet, path: str, value: str
) -> None:
    """Neither as a field, nor twice, nor in the query or the headers."""
    reserved = ["kv_transfer_params", "ec_transfer_params"]
    twice = "".join(f'"{name}": {value}, ' for name in reserved) * 2
    raw = b"{" + twice.encode() + json.dumps(PLAIN[path]).encode()[1:]
    query = "&".join(f"{name}={value}" for name in (*reserved, "vllm_xargs"))
    headers = {"Content-Type": "application/json"} | dict.fromkeys(reserved, value)
    async with fleet.http.post(
        f"{fleet.url}{path}?{query}", data=BytesIO(raw), headers=headers
    ) as reply:
        assert reply.status == 200

    calls = [call for instance in fleet.instances for call in instance.calls]
    assert calls
    for call in calls:
        assert call.query == ""
        assert not {name.lower() for name in call.headers} & {*reserved, "vllm_xargs"}
        # What the proxy itself says there is neither empty nor this.
        assert json.loads(value) not in [call.body[name] for name in reserved if name in call.body]


JSON_ROUTES = [
    *(("POST", path) for path in PLAIN),
    ("POST", "/v1/media"),
    ("POST", "/instances"),
    ("PUT", "/policies"),
    ("POST", "/policies"),
    ("POST", "/start_profile"),
]


@pytest.mark.security("S27")
@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "text/plain; charset=application/json",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=application/json",
        "application/json, text/plain",
        "application/jsonx",
        "json",
        "",
    ],
)
async def test_a_body_that_is_not_called_json_is_refused(launch: Launch, kind: str) -> None:
    """A web page of another origin may send the first ones without its browser asking."""
    key = {"X-API-Key": "admin-key-0123456789", "Content-Type": kind}
    settings: dict[str, Any] = {"admin_api_key": key["X-API-Key"], "dynamic_registration": True}
    async with launch(prefill=1, **settings) as fleet:
        for method, path in JSON_ROUTES:
            body = json.dumps(PLAIN.get(path, {"a": 1})).encode()
            async with fleet.http.request(
                method, fleet.url + path, data=BytesIO(body), headers=key
            ) as reply:
                assert reply.status == 415, path
                assert reply.headers["x-epd-error"] == "unsupported_media_type"
        assert all(instance.calls == [] for instance in fleet.instances)
        assert all("profile" not in " ".join(one.other_calls) for one in fleet.instances)


@pytest.mark.parametrize("path", PLAIN)
@pytest.mark.parametrize(
    "kind", ["Application/JSON; charset=utf-8", "application/json;", "application/ld+json"]
)
async def test_a_body_that_is_called_json_is_answered(fleet: Fleet, path: str, kind: str) -> None:
    body, headers = BytesIO(json.dumps(PLAIN[path]).encode()), {"Content-Type": kind}
    async with fleet.http.post(fleet.url + path, data=body, headers=headers) as reply:
        assert reply.status == 200


@pytest.mark.fault(74)
@pytest.mark.security("S26")
@pytest.mark.parametrize("path", WITH_MEDIA)
@pytest.mark.parametrize("kind", ["point_cloud_url", "prompt_embeds", "input_file"])
async def test_no_instance_gets_a_content_part_that_no_check_covers(
    fleet: Fleet, path: str, kind: str
) -> None:
    part = {"type": kind, kind: {"url": "http://169.254.169.254/"}, "data": "AAAA"}
    body = WITH_MEDIA[path](URL) | {"conversation_id": "c"}
    content_of(body).append(part)
    status, reply = await ask(fleet, path, body)

    assert (status, reply["error"]["type"]) in {
        (400, "BadRequestError"),
        (400, "invalid_request_error"),
    }
    assert all(instance.calls == [] for instance in fleet.instances)


@pytest.mark.parametrize(
    "part",
    [
        {"image_url": URL},
        {"image_url": {"url": URL}, "uuid": "theirs"},
        {"type": "input_image", "image_url": URL, "uuid": "theirs"},
    ],
)
async def test_a_picture_of_a_chat_is_encoded_in_every_spelling_of_vllms(
    fleet: Fleet, part: dict[str, Any]
) -> None:
    status, _ = await ask(fleet, "/v1/chat/completions", chat(part))

    assert status == 200
    [encode], [prefill], [decode] = fleet.e.calls, fleet.p.calls, fleet.d.calls
    [sent] = encode.parts
    assert (sent["type"], sent["image_url"]) == ("image_url", {"url": URL})
    for call in (prefill, decode):
        assert [one["type"] for one in call.parts] == ["image_embeds"]
        assert "theirs" not in json.dumps(call.body)


async def test_a_form_is_as_large_as_any_body_may_be(launch: Launch) -> None:
    async with launch(max_body_bytes=2000) as fleet:
        form = aiohttp.FormData({"file": BytesIO(bytes(2000))})
        async with fleet.http.post(f"{fleet.url}/v1/audio/transcriptions", data=form) as reply:
            assert reply.status == 413
        assert fleet.d.calls == []


@pytest.mark.fault(34)
@pytest.mark.parametrize("path", PLAIN)
async def test_what_is_passed_on_is_tried_on_another_instance(launch: Launch, path: str) -> None:
    async with launch(decode=2) as fleet:
        for instance in fleet.decode:
            instance.chat = fails_first(1, drops, decodes)
        fleet.decode[1].chat = decodes
        statuses = {(await ask(fleet, path, PLAIN[path]))[0] for _ in range(2)}

        assert statuses == {200}


async def test_the_version_is_ours_and_of_each_instance_its_own(fleet: Fleet) -> None:
    async with fleet.http.get(f"{fleet.url}/version") as reply:
        said = await reply.json()

    assert said == {
        "version": __version__,
        "instances": {instance.url: instance.version for instance in fleet.instances},
    }


@pytest.mark.security("S2")
@pytest.mark.parametrize("path", [path for path in PLAIN if not path.startswith(("/v1/", "/v2/"))])
async def test_instances_judge_the_key_of_paths_that_theirs_does_not_guard(
    fleet: Fleet, path: str
) -> None:
    """VLLM's `--api-key` is for paths under `/v1` and `/v2`."""
    for instance in fleet.instances:
        instance.api_key = "sk-instances"
    denied, reply = await ask(fleet, path, PLAIN[path], bearer("wrong"))
    assert (denied, fleet.d.calls) == (401, [])
    assert reply["error"]["code"] == 401

    assert (await ask(fleet, path, PLAIN[path], bearer("sk-instances")))[0] == 200


@pytest.mark.security("S2")
async def test_the_tokenizer_is_told_by_a_decode_instance_to_clients_with_a_key(
    fleet: Fleet,
) -> None:
    fleet.d.api_key = "sk-instances"
    answers = []
    for key in ("wrong", "sk-instances"):
        async with fleet.http.get(f"{fleet.url}/tokenizer_info", headers=bearer(key)) as reply:
            answers.append((reply.status, await reply.json()))

    assert [status for status, _ in answers] == [401, 200]
    assert answers[1][1] == {"tokenizer_class": "T"}
    assert "GET /tokenizer_info" not in fleet.p.other_calls


@pytest.mark.security("S9")
@pytest.mark.parametrize("url", ["file:///etc/passwd", "x", URL])
async def test_images_that_are_strings_are_checked_and_passed_on(fleet: Fleet, url: str) -> None:
    status, reply = await ask(fleet, "/v2/embed", {"images": [URL, url]})

    assert status == (200 if url == URL else 400)
    assert [call.body for call in fleet.d.calls] == ([{"images": [URL, url]}] if url == URL else [])
    assert url == URL or reply["error"]["param"] == "images[1]"


async def test_images_that_are_strings_are_fetched_by_the_proxy(launch: Launch) -> None:
    async with FakeOrigin().running() as origin:
        more = {"allow_http_media": True, "allow_private_media": True}
        domains = ("127.0.0.1",)
        async with launch(media_fetch="proxy", allowed_media_domains=domains, **more) as fleet:
            picture = f"http://127.0.0.1:{origin.port}/"
            assert (await ask(fleet, "/v2/embed", {"images": [picture]}))[0] == 200

            assert fleet.d.calls[0].body == {"images": [data_url(b"picture")]}


async def test_vectors_as_bytes_come_with_what_tells_them_apart(fleet: Fleet) -> None:
    async def encoded(_: web.Request, __: dict[str, Any]) -> web.Response:
        headers = {"Content-Type": "application/octet-stream", "metadata": '{"data": []}'}
        return web.Response(body=b"\0\x80", headers=headers)

    fleet.d.chat = encoded
    body = {"input": "hi", "encoding_format": "bytes"}
    async with fleet.http.post(f"{fleet.url}/v1/embeddings", json=body) as reply:
        assert (await reply.read(), reply.headers["metadata"]) == (b"\0\x80", '{"data": []}')


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_ping_asks_nobody(launch: Launch, keys: Path, method: str) -> None:
    async with launch(api_keys_file=keys) as fleet:
        await fleet.ready()
        async with fleet.http.request(method, f"{fleet.url}/ping") as reply:
            assert (reply.status, await reply.json()) == (200, {"status": "ready"})
        assert all(instance.other_calls == [] for instance in fleet.instances)


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/responses/r"), ("POST", "/v1/responses/r/cancel")]
)
async def test_a_response_is_gone_once_it_was_sent(fleet: Fleet, method: str, path: str) -> None:
    async with fleet.http.request(method, fleet.url + path) as reply:
        error = (await reply.json())["error"]

    assert (error["code"], reply.headers["x-epd-error"]) == (404, "unsupported_route")
    assert "not kept" in error["message"]


async def test_a_picture_that_was_pushed_is_named_in_a_response(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url) as fleet:
        pushed = {"model": "m", "content": [image(URL, uuid="cat")]}
        assert (await ask(fleet, "/v1/media", pushed))[0] == 200
        named = {"type": "input_image", "uuid": "cat"}

        assert (await ask(fleet, "/v1/responses", response(named)))[0] == 200
        assert (await ask(fleet, "/v1/responses", response(named | {"uuid": "dog"})))[0] == 404
        assert len(fleet.e.calls) == 1
