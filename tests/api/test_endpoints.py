"""Endpoints: the fields that each reads from a request, and the requests that it writes."""

import string
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.api.endpoint import RESERVED, Endpoint
from epd.api.endpoints import ENDPOINTS
from epd.api.items import EMBEDS, MODALITY, MMItem, raw_part, with_parts
from epd.errors import BadRequest, Overloaded, ProxyError
from tests.examples import scaled
from tests.requests import data_url

KV = {"do_remote_decode": True}
URL = data_url(b"1")
JSON = [path for path in ENDPOINTS if "/audio/" not in path]

CHAT, RESPONSES, MESSAGES, COMPLETIONS, EMBEDDINGS = (
    ENDPOINTS[f"/v1/{name}"]
    for name in ("chat/completions", "responses", "messages", "completions", "embeddings")
)

small = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.text(string.ascii_letters, max_size=3),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
keys = st.sampled_from(
    [*MODALITY, *EMBEDS, "type", "uuid", "text", "url", "source", "data", "media_type", "content"]
)
kinds = st.sampled_from([*MODALITY, "text", "image", "input_image", "tool_result", "base64", "url"])
like_parts = st.recursive(
    st.dictionaries(keys, small | kinds),
    lambda inner: st.dictionaries(keys, small | kinds | inner | st.lists(inner, max_size=2)),
    max_leaves=6,
)
like_messages = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "output", "reasoning", "type"]),
        small | st.lists(like_parts, max_size=3),
    ),
    max_size=3,
)
like_bodies = st.dictionaries(
    st.sampled_from(["messages", "input", "prompt", "documents", "query", "inputs"]),
    small | like_messages | st.just("words"),
)


def read(endpoint: Endpoint, body: dict[str, Any]) -> dict[str, Any]:
    return dict(endpoint.parse(orjson.dumps(body)))


@pytest.mark.fault(52)
@pytest.mark.parametrize("path", JSON)
@settings(max_examples=scaled(25))  # for each of 16 endpoints, which share most of their code
@given(like_bodies)
def test_any_body_is_read_or_refused(path: str, body: dict[str, Any]) -> None:
    endpoint = ENDPOINTS[path]
    try:
        parsed = endpoint.parse(orjson.dumps(body))
        items = tuple(endpoint.items(parsed))
    except BadRequest as error:
        assert error.status == 400
        return
    for item in items:
        assert item.kind in MODALITY
        holder: Any = parsed
        for step in item.path:
            holder = holder[step]
        assert isinstance(holder, dict)


@pytest.mark.fault(56)
@pytest.mark.security("S5")
@pytest.mark.parametrize("path", JSON)
@pytest.mark.parametrize("field", RESERVED)
def test_no_endpoint_passes_reserved_fields(path: str, field: str) -> None:
    body = {"messages": [], "input": [], "prompt": "", field: {"a": 1}}
    parsed = read(ENDPOINTS[path], body)

    assert field not in parsed
    with pytest.raises(BadRequest) as refused:
        read(ENDPOINTS[path], body | {"vllm_xargs": {field: "x"}})
    assert refused.value.slug == "reserved_field"


def picture(**more: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": URL, **more}


def test_items_of_responses_are_found_in_messages_and_tool_outputs() -> None:
    body = read(
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "?"}, picture()]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": [picture(uuid="cat")]},
                {"role": "user", "content": "and?"},
            ]
        },
    )
    items = list(RESPONSES.items(body))

    assert [(item.param_path, item.uuid) for item in items] == [
        ("input[0].content[1]", None),
        ("input[2].output[0]", "cat"),
    ]
    assert {item.part["image_url"]["url"] for item in items} == {URL}
    assert items[0].media_param == "input[0].content[1].image_url"


def test_a_picture_of_a_response_is_sent_under_the_key_of_the_proxy() -> None:
    body = read(RESPONSES, {"input": [{"role": "user", "content": [picture(uuid="own")]}]})
    [item] = RESPONSES.items(body)
    named = with_parts(body, {item: raw_part(replace(item, content_key="key"))})

    assert named["input"][0]["content"] == [
        {"type": "input_image", "detail": "auto", "image_url": URL, "uuid": "key"}
    ]
    assert body["input"][0]["content"] == [picture(uuid="own")]


@pytest.mark.security("S11")
@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_image", "image_embeds": {"image_grid_thw": [1, 2, 2]}, "uuid": "k"},
        {"type": "input_image", "image_url": URL, "image_embeds": {"image_grid_thw": [1]}},
        {"type": "image_embeds", "image_embeds": {}, "uuid": "k"},
        {"type": "input_text", "text": "?", "image_url": URL, "uuid": "k"},
        {"type": "input_text", "text": "?", "uuid": "k"},
        {"type": "input_image", "image_url": URL, "audio_url": URL},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "input_audio", "input_audio": {"data": "a", "format": "wav"}},
        {"image_url": URL},
        {"type": "input_image", "file_id": "f"},
        {"type": "input_image", "image_url": {"url": URL}},
        {"type": "input_image", "image_url": ""},
        picture(uuid="a b"),
        7,
    ],
)
@pytest.mark.parametrize("field", ["content", "output"])
def test_vllm_would_read_such_parts_of_a_response_as_media(field: str, part: Any) -> None:
    """In vLLM, an item of any type keeps fields that OpenAI does not know."""
    for item in ({"role": "user"}, {"type": "computer_call_output", "role": "user"}):
        body = read(RESPONSES, {"input": [{**item, field: [part]}]})
        with pytest.raises(BadRequest):
            list(RESPONSES.items(body))


@pytest.mark.parametrize(
    "field", ["previous_response_id", "background", "conversation", "previous_input_messages"]
)
def test_a_response_that_would_need_a_memory_is_refused(field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read(RESPONSES, {"input": "hi", field: "x"})

    assert (refused.value.slug, refused.value.param) == ("unsupported_field", field)


def test_engines_store_no_response_and_get_no_previous_response_id() -> None:
    parsed = read(RESPONSES, {"input": "hi", "store": True, "request_id": "mine"})

    assert parsed == {"input": "hi", "store": False}


BASE64 = {"type": "base64", "media_type": "image/png", "data": "MQ=="}


def test_items_of_messages_are_found_in_content_and_tool_results() -> None:
    tool = {"type": "tool_result", "tool_use_id": "1"}
    body = read(
        MESSAGES,
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "source": BASE64}]},
                {"role": "assistant", "content": "a cat"},
                {
                    "role": "user",
                    "content": [
                        {**tool, "content": [{"type": "text", "text": "a"}, {"type": "image"}]},
                        {**tool, "content": "words"},
                    ],
                },
            ]
        },
    )
    nested = body["messages"][2]["content"][0]["content"][1]
    nested["source"] = {"type": "url", "url": "https://a/b.png"}
    items = list(MESSAGES.items(body))

    assert [(item.param_path, item.part["image_url"]["url"]) for item in items] == [
        ("messages[0].content[0]", URL),
        ("messages[2].content[0].content[1]", "https://a/b.png"),
    ]
    assert not any(item.is_named for item in items)
    changed = with_parts(body, {items[1]: raw_part(items[0])})
    there = changed["messages"][2]["content"][0]["content"][1]
    assert there == {"type": "image", "source": {"type": "url", "url": URL}}
    assert nested["source"]["url"] == "https://a/b.png"
    assert changed["messages"][0] is body["messages"][0]


def of_message(source: Any, *, in_result: bool = False) -> list[MMItem]:
    content = [{"type": "image", "source": source}]
    if in_result:
        content = [{"type": "tool_result", "tool_use_id": "1", "content": content}]
    return list(
        MESSAGES.items(read(MESSAGES, {"messages": [{"role": "user", "content": content}]}))
    )


@pytest.mark.parametrize(
    "source",
    [
        "x",
        {"type": "base64", "data": ""},
        {"type": "base64", "data": "a", "media_type": 1},
        {"type": "url"},
        {"type": "url", "data": "a"},
        {"type": "file", "url": "a"},
    ],
)
def test_a_picture_without_a_place_is_refused(source: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        of_message(source)

    assert refused.value.param == "messages[0].content[0].source"


@pytest.mark.parametrize("source", [None, {}])
def test_a_message_ignores_a_picture_without_a_source_as_vllm_does(source: Any) -> None:
    assert of_message(source) == []
    with pytest.raises(BadRequest):
        of_message(source, in_result=True)


@pytest.mark.parametrize("in_result", [False, True])
@pytest.mark.parametrize("media_type", [{}, {"media_type": None}, {"media_type": "image/jpeg"}])
@pytest.mark.parametrize("kind", [{}, {"type": "base64"}, {"type": None}])
def test_a_source_is_base64_of_a_jpeg_unless_it_says_otherwise(
    kind: Any, media_type: Any, in_result: bool
) -> None:
    [item] = of_message({**kind, **media_type, "data": "MQ=="}, in_result=in_result)

    assert item.part["image_url"]["url"] == "data:image/jpeg;base64,MQ=="


@pytest.mark.parametrize("field", ["messages", "input"])
@pytest.mark.parametrize("batch", [False, True])
def test_conversations_to_embed_have_items_wherever_they_are(field: str, batch: bool) -> None:
    part = {"type": "image_url", "image_url": {"url": URL}}
    talk: list[Any] = [{"role": "user", "content": [part]}]
    body = {field: [talk, talk]} if batch else {field: talk}
    items = list(EMBEDDINGS.items(body))

    assert len(items) == 1 + batch
    changed: Any = with_parts(body, {items[-1]: {"type": "text"}})[field]
    message = changed[1][0] if batch else changed[0]
    assert message["content"] == [{"type": "text"}]


@pytest.mark.parametrize("value", ["words", ["a", "b"], [1, 2], [[1], [2]], [], [[]], 7])
def test_texts_and_tokens_to_embed_have_none(value: Any) -> None:
    assert list(EMBEDDINGS.items({"input": value})) == []


def test_a_conversation_among_texts_is_refused() -> None:
    with pytest.raises(BadRequest):
        list(EMBEDDINGS.items({"input": ["a", {"role": "user", "content": []}]}))


@pytest.mark.parametrize(
    ("prompt", "one"),
    [
        ("a", True),
        ([1, 2], True),
        ([], False),
        (["a"], True),
        ([[1, 2]], True),
        ([[]], False),
        (["a", "b"], False),
        ([[1], [2]], False),
        ([["a"]], False),
        (None, False),
    ],
)
def test_prefill_takes_completions_of_one_prompt(prompt: Any, one: bool) -> None:
    assert COMPLETIONS.can_prefill({"prompt": prompt}) is one


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "prefills"),
    [
        ({}, True),
        ({"n": 1, "echo": False, "use_beam_search": False, "prompt_logprobs": None}, True),
        ({"logprobs": 1, "stream": True, "suffix": "b", "min_tokens": 2}, True),
        ({"n": 2}, False),
        ({"use_beam_search": True}, False),
        ({"echo": True}, False),
        ({"prompt_logprobs": 0}, False),
    ],
)
def test_requests_for_one_engine_are_not_prefilled_elsewhere(
    endpoint: Endpoint, fields: dict[str, Any], prefills: bool
) -> None:
    assert endpoint.can_prefill({"prompt": "a", "messages": [], **fields}) is prefills


def test_prompts_that_are_not_tokens_are_not_prefilled_separately() -> None:
    assert not COMPLETIONS.can_prefill({"prompt": "a", "prompt_embeds": "b"})


@pytest.mark.parametrize(
    ("endpoint", "limit"),
    [
        (RESPONSES, "max_output_tokens"),
        *((endpoint, "max_tokens") for endpoint in (CHAT, MESSAGES, COMPLETIONS)),
    ],
)
def test_prefill_and_release_ask_for_one_token(endpoint: Endpoint, limit: str) -> None:
    client = {"a": 1, "stream": True, "stream_options": {}, "min_tokens": 2, limit: 9}
    body = {**client, "kv_transfer_params": KV}

    assert endpoint.prefill(client, KV) == {
        "a": 1,
        "stream": False,
        limit: 1,
        "kv_transfer_params": KV,
    }
    assert endpoint.release(body) == {"a": 1, "stream": True, limit: 1, "kv_transfer_params": KV}


def test_errors_have_the_shape_that_clients_of_the_endpoint_expect() -> None:
    error = BadRequest("no", param="messages[0]")
    openai, anthropic = (orjson.loads(it.error(error)) for it in (CHAT, MESSAGES))

    assert openai["error"] == {
        "message": "no",
        "type": "BadRequestError",
        "param": "messages[0]",
        "code": 400,
    }
    assert anthropic == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "messages[0]: no"},
    }


@pytest.mark.parametrize(
    ("param", "message", "shown"),
    [
        ("conversation_id", "conversation_id must be a string", "conversation_id must be a string"),
        ("input", "input_audio is none", "input: input_audio is none"),
        (None, "no", "no"),
    ],
)
def test_an_error_names_its_position_once(param: str | None, message: str, shown: str) -> None:
    error = orjson.loads(MESSAGES.error(BadRequest(message, param=param)))

    assert error["error"]["message"] == shown


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Overloaded("busy"), "overloaded_error"),
        (ProxyError("bug"), "api_error"),
        (BadRequest("no"), "invalid_request_error"),
    ],
)
def test_anthropics_clients_go_by_the_type_of_an_error(error: ProxyError, kind: str) -> None:
    assert orjson.loads(MESSAGES.error(error))["error"]["type"] == kind


SCORE, POOLING, COHERE = (ENDPOINTS[path] for path in ("/score", "/pooling", "/v2/embed"))
IMAGE: dict[str, Any] = {"type": "image_url", "image_url": {"url": URL}}


@pytest.mark.parametrize(
    "field",
    ["queries", "documents", "items", "data_1", "data_2", "text_1", "text_2", "query"],
)
def test_score_requests_have_items_in_both_fields_under_all_names_of_vllm(field: str) -> None:
    alone = list(SCORE.items({field: {"content": [IMAGE]}}))
    among = list(SCORE.items({field: ["a", {"content": ["b", {"type": "text"}, IMAGE]}]}))

    assert [item.param_path for item in (*alone, *among)] == [
        f"{field}.content[0]",
        f"{field}[1].content[2]",
    ]
    named = raw_part(replace(alone[0], content_key="key"))
    body: Any = with_parts({field: {"content": [IMAGE]}}, {alone[0]: named})
    assert body[field]["content"] == [IMAGE | {"uuid": "key"}]


@pytest.mark.parametrize("value", ["a", ["a", "b"], [], None])
def test_texts_to_score_have_none(value: Any) -> None:
    assert list(SCORE.items({"queries": value, "documents": value})) == []


@pytest.mark.security("S26")
@pytest.mark.parametrize(
    "value",
    [
        7,
        {},
        {"content": "words"},
        [[IMAGE]],
        [{"text": "a"}],
        {"content": [{"type": "image_embeds", "image_embeds": {}, "uuid": "k"}]},
        {"content": [{"type": "point_cloud_url", "point_cloud_url": {"url": URL}}]},
    ],
)
def test_score_inputs_without_a_check_are_rejected(value: Any) -> None:
    with pytest.raises(BadRequest):
        list(SCORE.items({"documents": value}))


@pytest.mark.security("S26")
def test_no_plugin_of_an_instance_reads_a_request() -> None:
    with pytest.raises(BadRequest) as refused:
        read(POOLING, {"data": {"url": "http://169.254.169.254/"}, "input": "a"})

    assert (refused.value.slug, refused.value.param) == ("unsupported_field", "data")


def test_images_of_coheres_embeddings_are_strings_and_among_inputs() -> None:
    text = {"type": "text", "text": "a"}
    body = read(COHERE, {"images": [URL], "inputs": [{"content": [text, IMAGE]}]})
    string, part = COHERE.items(body)

    assert (string.media_param, part.media_param) == (
        "images[0]",
        "inputs[0].content[1].image_url.url",
    )
    assert not string.is_named
    assert not part.is_named
    other = {"type": "image_url", "image_url": {"url": "data:,2"}}
    changed: Any = with_parts(body, dict.fromkeys((string, part), other))
    assert changed == {"images": ["data:,2"], "inputs": [{"content": [text, other]}]}


@pytest.mark.security("S26")
@pytest.mark.parametrize(
    "body",
    [
        {"images": URL},
        {"images": [7]},
        {"images": [{"image_url": URL}]},
        {"inputs": {}},
        {"inputs": ["a"]},
        {"inputs": [{"content": "a"}]},
        {"inputs": [{"content": ["a"]}]},
        {"inputs": [{"content": [IMAGE | {"uuid": "k"}]}]},
        {"inputs": [{"content": [{"type": "image_url", "image_url": URL}]}]},
        {"inputs": [{"content": [{"type": "image_url"}]}]},
        {"inputs": [{"content": [{"type": "text", "text": "a", "image_url": {"url": URL}}]}]},
        {"inputs": [{"content": [{"type": "video_url", "video_url": {"url": URL}}]}]},
    ],
)
def test_invalid_inputs_of_coheres_api_are_rejected(body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        list(COHERE.items(read(COHERE, body)))
