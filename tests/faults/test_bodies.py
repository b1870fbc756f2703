"""Bodies of every shape: the proxy serves them or rejects them with the reason."""

import asyncio
import copy
import json
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from epd.api.body import MAX_CONTAINERS, MAX_DEPTH, MAX_VALUES
from tests.examples import scaled
from tests.requests import audio_url, image, input_audio, request, text, video
from tests.support.fake_instance import decodes
from tests.support.fleet import Fleet, Launch

SECRET = "the-password-is-swordfish"


async def answer(fleet: Fleet, body: bytes) -> tuple[int, str | None, dict[str, Any]]:
    """Return status, error code and error of an answer."""
    async with fleet.post(body) as reply:
        content = await reply.read()
        if reply.status == 200:
            return 200, None, {}
        assert reply.headers["Content-Type"] == "application/json"
        assert reply.headers["x-epd-stage"] == "proxy"
        error = json.loads(content)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == reply.status
        return reply.status, reply.headers["x-epd-error"], error


def nested(depth: int) -> bytes:
    """Return a request with `depth` levels of nesting."""
    inside = depth - 1
    return b'{"messages": [], "x": %s%s}' % (b"[" * inside, b"]" * inside)


@pytest.mark.fault(50)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"messages": [}',
        b'{"messages": [], "x": NaN}',
        b'{"messages": [], "x": 1e999}',
        b'{"messages": [], "x": %s}' % (b"9" * 5000),
        b'{"messages": [], "x": "\xff\xfe"}',
        b'{"messages": [], "x": "\xed\xa0\x80"}',
        b'{"messages": [], "x": "\\ud800"}',
        b'{"messages": [], "x": "\x00"}',
        b'\xef\xbb\xbf{"messages": []}',
        '{"messages": []}'.encode("utf-16"),
        b'{"messages": []} {"messages": []}',
        nested(MAX_DEPTH + 1),
        nested(255),
        nested(1025),
        b"[" * 100_000,
        b'{"messages":' * 100_000,
        b'{"messages": [], "x": [%s 1]}' % (b"1," * MAX_VALUES),
        b'{"messages": [], "x": [%s {}]}' % (b"{}," * MAX_CONTAINERS),
        b'{"messages": [], "x": [%s 1]}' % (b'{"a": "b"},' * MAX_CONTAINERS),
        b'{"messages": [], "x": {%s}}' % b",".join(b'"%d": "b"' % i for i in range(MAX_VALUES)),
        b'{"messages": [], "x": %s}' % (b"[" * (MAX_CONTAINERS + 1)),
        b'"",' * 4 * MAX_VALUES,
    ],
    ids=lambda body: f"{body[:30]!r}-{len(body)}",
)
async def test_invalid_or_excessive_json_is_rejected(launch: Launch, body: bytes) -> None:
    async with launch() as fleet:
        status, slug, error = await answer(fleet, body)

        assert (status, slug) == (400, "invalid_json")
        assert error["type"] == "BadRequestError"
        assert fleet.d.calls == []


@pytest.mark.fault(50)
@pytest.mark.security("S19")
async def test_json_errors_state_the_position_and_no_content(
    launch: Launch,
) -> None:
    async with launch() as fleet:
        body = b'{"messages": ["%s", nonsense]}' % SECRET.encode()
        _, _, error = await answer(fleet, body)

        assert "at character 43" in error["message"]
        assert SECRET not in error["message"]
        assert "nonsense" not in error["message"]


@pytest.mark.fault(50)
async def test_a_body_as_deep_as_is_allowed_goes_through_every_stage(launch: Launch) -> None:
    async with launch(prefill=1) as fleet:
        deep: Any = "x"
        for _ in range(MAX_DEPTH - 1):
            deep = [deep]
        body = request(image(), mm_processor_kwargs={}, x=deep)
        assert (await fleet.chat(body))[0] == 200
        assert fleet.p.calls[0].body["x"] == fleet.d.calls[0].body["x"] == deep


@pytest.mark.fault(50)
@pytest.mark.parametrize(
    "body",
    [
        request(text(), logit_bias={str(token): -100 for token in range(152_000)}),
        {"messages": [{"role": "user", "content": [text("a"), text("b")]}] * 10_000},
        {"messages": [], "tools": [{"type": "function", "function": {"x": [[], {}]}}] * 5_000},
    ],
    ids=["a bias per token", "a long conversation", "many tools"],
)
async def test_a_large_valid_body_is_read(launch: Launch, body: dict[str, Any]) -> None:
    async with launch() as fleet:
        assert (await fleet.chat(body))[0] == 200


@pytest.mark.fault(51)
@pytest.mark.fault(49)
async def test_text_is_read_up_to_its_own_limit(launch: Launch) -> None:
    """Parsing blocks the event loop, so the size of the text is limited."""
    limit, body = 100_000, b'{"model": "m", "messages": [], "x": "'
    async with launch(max_text_bytes=limit) as fleet:
        as_long = body + b"x" * (limit - len(body) - 2) + b'"}'
        assert (await answer(fleet, as_long))[0] == 200
        fleet.d.calls.clear()
        status, slug, error = await answer(fleet, as_long + b" ")

        assert (status, slug) == (413, "text_too_large")
        assert f"more than {limit} bytes" in error["message"]
        assert fleet.d.calls == []


@pytest.mark.fault(49)
@pytest.mark.parametrize("slash", [rb"\/", rb"\u002F"])
async def test_media_are_no_text_and_have_one_key_however_they_are_escaped(
    launch: Launch, slash: bytes
) -> None:
    plain = json.dumps(request(video(secrets.token_bytes(200_000)), text())).encode()
    async with launch(max_text_bytes=100_000) as fleet:
        for body in (plain, plain.replace(b"/", slash)):
            assert (await answer(fleet, body))[0] == 200

        first, second = (call.body["messages"][0]["content"] for call in fleet.d.calls)
        assert "uuid" in first[0]
        assert first == second


@pytest.mark.fault(51)
async def test_the_last_of_duplicate_keys_counts_for_all_instances(launch: Launch) -> None:
    """Instances receive the body as the proxy parsed it, without duplicate keys."""
    raw_bodies: list[bytes] = []

    async def chat(request: Any, body: dict[str, Any]) -> Any:
        raw_bodies.append(await request.read())
        return await decodes(request, body)

    async with launch(prefill=1) as fleet:
        fleet.d.chat = chat
        part = json.dumps(image(b"2"))
        await answer(
            fleet,
            b'{"model": "a", "seed": 1, "messages": [], "seed": 2, "model": "b", '
            b'"messages": [{"role": "user", "role": "system", "content": "x", "content": ['
            b'{"type": "text", "type": "image_url", "text": "x", %s]}]}' % part[1:].encode(),
        )

        assert len(raw_bodies) == 1
        for key in (b'"seed"', b'"model"', b'"messages"', b'"role"', b'"content"'):
            assert raw_bodies[0].count(key) == 1
        assert fleet.d.calls[0].body["seed"] == fleet.p.calls[0].body["seed"] == 2
        for call in (fleet.p.calls[0], fleet.d.calls[0]):
            assert (call.body["seed"], call.body["model"]) == (2, "b")
            assert call.body["messages"][0]["role"] == "system"
        assert len(fleet.e.calls) == 1


def content(*parts: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


@pytest.mark.fault(52)
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ([], None),
        (None, None),
        ({}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [None]}, "messages[0]"),
        ({"messages": [{}, "x"]}, "messages[1]"),
        ({"messages": [], "model": ["m"]}, "model"),
        ({"messages": [{"role": "assistant", "reasoning": []}]}, "messages[0].reasoning"),
        ({"messages": [{"reasoning_content": {"uuid": "x"}}]}, "messages[0].reasoning_content"),
        (content(None), "messages[0].content[0]"),
        (content(text(), 7), "messages[0].content[1]"),
        (content([image()]), "messages[0].content[0]"),
        (content({}), "messages[0].content[0]"),
        (content({"type": None}), "messages[0].content[0]"),
        (content({"type": ["image_url"]}), "messages[0].content[0]"),
        (content({"type": "image_url"}), "messages[0].content[0].image_url"),
        (
            content({"type": "image_url", "image_url": "https://x/y"}),
            "messages[0].content[0].image_url",
        ),
        (content(image("")), "messages[0].content[0].image_url"),
        (content(image("picture")), "messages[0].content[0].image_url.url"),
        (content(image("data:" + "x" * 5000)), "messages[0].content[0].image_url.url"),
        (
            content({"type": "input_audio", "input_audio": "x"}),
            "messages[0].content[0].input_audio",
        ),
        (content({"type": "text", "text": "x", "uuid": "x"}), "messages[0].content[0]"),
        (content({"type": "text", "image_url": {"url": "x"}}), "messages[0].content[0]"),
        (content({"type": "new"}), "messages[0].content[0].type"),
        (content(image(uuid="../x")), "messages[0].content[0].uuid"),
    ],
    ids=str,
)
async def test_a_field_of_the_wrong_shape_is_rejected_by_its_path(
    launch: Launch, body: object, param: str | None
) -> None:
    async with launch() as fleet:
        status, _, error = await answer(fleet, json.dumps(body).encode())

        assert (status, error["param"]) == (400, param)
        assert fleet.e.calls == fleet.d.calls == []


@pytest.mark.fault(52)
@pytest.mark.parametrize("part", ["words", {"type": "refusal", "refusal": "no", "new": 1}])
async def test_text_parts_are_passed_on_unchanged(launch: Launch, part: object) -> None:
    async with launch() as fleet:
        status, *_ = await answer(fleet, json.dumps(content(part)).encode())

        assert status == 200
        assert fleet.d.calls[0].body == content(part)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
VALID = request(
    text(),
    image(b"1"),
    image("https://example.com/a.png", uuid="cat"),
    audio_url(),
    input_audio(),
    video(),
    "words",
    stream=True,
    seed=1,
    mm_processor_kwargs={"max_pixels": 9},
    cache_salt="salt",
)
NAMES = ["type", "text", "image_url", "input_audio", "uuid", "url", "content", "image_embeds"]


def paths(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each nested value."""
    listed = enumerate(value) if isinstance(value, list) else ()
    for key, inner in value.items() if isinstance(value, dict) else listed:
        yield (*above, key)
        yield from paths(inner, (*above, key))


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """Return a valid request with up to three values replaced, removed or moved."""
    body = copy.deepcopy(VALID)
    for _ in range(draw(st.integers(1, 3))):
        *above, key = draw(st.sampled_from(list(paths(body)) or [("model",)]))
        holder: Any = body
        for step in above:
            holder = holder[step]
        match draw(st.sampled_from(["replace", "remove", "add"])):
            case "replace":
                holder[key] = draw(json_values | st.sampled_from([*NAMES, image(), [text()]]))
            case "remove":
                del holder[key]
            case _ if isinstance(holder, dict):
                holder[draw(st.sampled_from(NAMES))] = draw(json_values | st.sampled_from(NAMES))
    return body


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Return the bytes of a valid request with some bytes replaced."""
    raw = json.dumps(VALID).encode()
    start, end = sorted(draw(st.tuples(*[st.integers(0, len(raw))] * 2)))
    return raw[:start] + draw(st.binary(max_size=9)) + raw[min(end, start + 9) :]


@pytest.mark.fault(50, 52)
@settings(max_examples=scaled(150))
@given(
    json_values.map(lambda value: json.dumps(value).encode())
    | mutated().map(lambda value: json.dumps(value, ensure_ascii=False).encode())
    | damaged()
)
async def test_bodies_of_every_shape_are_served_or_refused(body: bytes) -> None:
    async with Launch()(prefill=1, max_body_bytes=10**6) as fleet, asyncio.timeout(120):
        status, slug, error = await answer(fleet, body)

        assert len(fleet.d.calls) == (status == 200)
        assert status in {200, 400} or (status, slug) == (404, "unknown_media")
        if status != 200:
            whole = slug == "invalid_json" or error["message"] == "the body must be a JSON object"
            assert whole or error["param"]


@pytest.mark.fault(53)
async def test_too_many_items_are_refused_before_any_is_looked_into(launch: Launch) -> None:
    """The proxy counts items before it validates any of them."""
    async with launch() as fleet:
        parts = [image("data:image/png;base64,not base64")] * 20_000
        status, slug, error = await answer(fleet, json.dumps(content(*parts, None)).encode())

        assert (status, slug, error["param"]) == (400, "too_many_items", "messages")
        assert fleet.e.calls == fleet.d.calls == []


@pytest.mark.fault(54)
@pytest.mark.parametrize(
    "bad", ["a b", "ü", "x" * 129, "", "a/b", "a:b", "a%0d%0ab", "\tx\ty", "日本"]
)
async def test_an_invalid_request_id_is_replaced(launch: Launch, bad: str) -> None:
    async with launch() as fleet:
        async with fleet.post(request(text()), {"x-request-id": bad}) as reply:
            ours = reply.headers["X-Request-Id"]

        assert len(ours) == 32
        assert [call.headers["X-Request-Id"] for call in fleet.d.calls] == [ours]
        assert [done.request_id for done in fleet.events.requests] == [ours]


@pytest.mark.fault(54)
async def test_two_requests_of_one_id_are_two_to_the_instances(launch: Launch) -> None:
    async with launch(prefill=1) as fleet:
        headers = {"x-request-id": "again"}
        posts = (fleet.chat(request(image()), headers) for _ in range(2))
        assert [status for status, _ in await asyncio.gather(*posts)] == [200, 200]

        ids = [{call.headers["X-Request-Id"] for call in one.calls} for one in (fleet.p, fleet.d)]
        assert ids[0] == ids[1]
        assert len(ids[0]) == 2
        assert all(one.startswith("again-") for one in ids[0])
        assert [done.request_id for done in fleet.events.requests] == ["again", "again"]
        assert {done.engine_id for done in fleet.events.requests} == ids[0]


@pytest.mark.fault(54)
async def test_a_clients_id_is_the_answers(launch: Launch) -> None:
    async with launch() as fleet:
        for sent, status in ((request(text()), 200), ({"messages": None}, 400)):
            async with fleet.post(sent, {"x-request-id": "mine"}) as reply:
                assert (reply.status, reply.headers["X-Request-Id"]) == (status, "mine")


@pytest.mark.fault(54)
async def test_two_request_ids_are_both_ignored(launch: Launch) -> None:
    async with launch() as fleet:
        headers = CIMultiDict([("x-request-id", "one"), ("x-request-id", "two")])
        url = f"{fleet.url}/v1/chat/completions"
        async with fleet.http.post(url, json=request(text()), headers=headers) as reply:
            assert reply.status == 200
            assert len(reply.headers["X-Request-Id"]) == 32


@pytest.mark.fault(56)
@pytest.mark.security("S5")
@pytest.mark.parametrize("prefill", [0, 1])
async def test_a_clients_transfer_parameters_reach_no_instance(
    launch: Launch, prefill: int
) -> None:
    forged = {"do_remote_prefill": True, "remote_host": "evil", "remote_port": 1}
    async with launch(prefill=prefill) as fleet:
        body = request(image(), kv_transfer_params=forged, ec_transfer_params={"stolen": {}})
        assert (await fleet.chat(body))[0] == 200

        for instance in (*fleet.encode, *fleet.prefill, *fleet.decode):
            assert "evil" not in json.dumps(instance.calls[0].body)
            assert "stolen" not in json.dumps(instance.calls[0].body)
