"""Content parts, as the proxy and the installed vLLM classify them."""

import importlib
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orjson import dumps

from epd.api.endpoints import ENDPOINTS
from epd.api.items import (
    MODALITY,
    PICTURE,
    REFUSED,
    TEXTS,
    MMItem,
    metadata_part,
    raw_part,
    with_parts,
)
from epd.api.messages import BLOCKS
from epd.errors import BadRequest
from epd.media.parts import Known, source

pytestmark = pytest.mark.full

CHAT, RESPONSES, MESSAGES = (
    ENDPOINTS[f"/v1/{name}"] for name in ("chat/completions", "responses", "messages")
)


def loaded(name: str) -> Any:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: scripts/test.sh installs it")
    with warnings.catch_warnings(action="ignore"):
        return importlib.import_module(name)


def vllms_parser() -> Callable[[Any], tuple[str, Any]]:
    """Return vLLM's parser of a part: in a module up to 0.32, in a package from 0.33 on."""
    names = vars(loaded("vllm.renderers.chat_utils"))
    if "_parse_chat_message_content_mm_part" not in names:
        names = vars(loaded("vllm.renderers.chat_utils.chat_message"))
        return names["parse_chat_message_content_mm_part"]  # type: ignore[no-any-return]
    return names["_parse_chat_message_content_mm_part"]  # type: ignore[no-any-return]


def extra_fields(part: Any) -> dict[str, Any]:
    """Return the fields of a part that vLLM gives to the chat template."""
    names = vars(loaded("vllm.renderers.chat_utils"))
    if "_collect_extra_fields" not in names:
        names = vars(loaded("vllm.renderers.chat_utils.chat_message"))
    collect = names.get("_collect_extra_fields") or names["collect_extra_fields"]
    return {key: value for key, value in collect(part).items() if key not in REFUSED}


def chat_part(part: Any) -> Any:
    """Return a part as vLLM's chat endpoint has validated it."""
    request = loaded("vllm.entrypoints.openai.chat_completion.protocol").ChatCompletionRequest
    body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    [message] = request.model_validate(body).messages
    [read] = message["content"]
    return read


def response_part(part: Any, *, of_tool: bool) -> Any:
    """Return a part as vLLM's responses endpoint has validated it and put it into a chat."""
    request = loaded("vllm.entrypoints.openai.responses.protocol").ResponsesRequest
    utils = loaded("vllm.entrypoints.openai.responses.utils")
    tool = {"type": "function_call_output", "call_id": "c", "output": [part]}
    item = tool if of_tool else {"role": "user", "content": [part]}
    asked = request.model_validate({"model": "m", "input": [item]})
    [message] = utils.construct_input_messages(request_input=asked.input)
    [read] = message["content"]
    return read


def read_by_vllm(validated: Callable[[Any], Any], part: Any) -> tuple[str, Any]:
    """Return vLLM's type of a part, `named` without media, or `refused`; and the read part."""
    refusal = loaded("vllm.exceptions").VLLMValidationError
    try:
        read = validated(part)
        kind, content = vllms_parser()(read)
    except (refusal, ValueError, TypeError, AttributeError):  # of its parsers and of pydantic
        return "refused", None
    media = content.get("data") if isinstance(content, dict) else content
    if kind in {*MODALITY, PICTURE} and not media:
        return ("named" if read.get("uuid") is not None else "refused"), read
    return kind, read


def by_vllm(part: Any) -> str:
    """Return vLLM's type of a chat's part, `named` without media, or `refused`."""
    return read_by_vllm(chat_part, part)[0]


def by_proxy(part: Any, endpoint: Any = CHAT, field: str = "content") -> tuple[str, MMItem | None]:
    """Return the proxy's type of a part, `named` or `refused`, and its item."""
    name = "messages" if endpoint is CHAT else "input"
    body = {name: [{"role": "user", field: [part]}]}
    try:
        endpoint.check(body)
        item = next(endpoint.items(body), None)
        named = item is not None and isinstance(source(item), Known)
    except BadRequest:
        return "refused", None
    return ("named" if named else item.kind if item else str(part["type"])), item


URL = "data:image/png;base64,AAAA"
SOUND = {"data": "AAAA", "format": "wav"}
MEDIA: dict[str, list[Any]] = {
    "image_url": [URL, {"url": URL}, {"url": URL, "detail": "high"}, {"url": None}, {}, None],
    "audio_url": [URL, {"url": URL}, {"url": None}, None],
    "video_url": [URL, {"url": URL}, {"url": None}, None],
    "input_audio": [SOUND, {"data": "AAAA"}, {**SOUND, "data": ""}, None],
}
EXTRA: list[dict[str, Any]] = [{}, {"cache_control": {"type": "ephemeral"}}, {"detail": "high"}]
SPELLINGS = [
    {**kind, key: value, **name, **more}
    for key, values in MEDIA.items()
    for value in values
    for kind in ({}, {"type": None}, {"type": key}, {"type": PICTURE})
    if key == "image_url" or kind.get("type") != PICTURE
    for name in ({}, {"uuid": None}, {"uuid": "u"})
    for more in EXTRA
] + [
    {"type": kind, key: "a", **name, **more}
    for kind in sorted(TEXTS)
    for key in ("text", "refusal", "thinking", "name")
    for name in ({}, {"uuid": None})
    for more in EXTRA
]
"""Parts in all spellings that vLLM's API might accept, except text with a name (`uuid`): the proxy
rejects it, since no name of a client may be forwarded (S11)."""


def test_no_spelling_that_vllm_accepts_is_refused_or_taken_for_something_else() -> None:
    theirs = [by_vllm(part) for part in SPELLINGS]
    accepted = [kind for kind in theirs if kind != "refused"]
    for part, kind in zip(SPELLINGS, theirs, strict=True):
        expected = "image_url" if kind == PICTURE else kind
        assert kind == "refused" or by_proxy(part)[0] == expected, part

    assert {*accepted} == {*TEXTS, *MODALITY, PICTURE, "named"}


OTHERS = [*MODALITY, *REFUSED, "uuid", "text", "refusal", "name", "file_id", "language"]
FULL: list[dict[str, Any]] = [
    {"type": kind, key: value}
    for kind, key, value in [
        ("text", "text", "a"),
        ("input_text", "text", "a"),
        ("output_text", "text", "a"),
        ("refusal", "refusal", "a"),
        ("thinking", "thinking", "a"),
        ("tool_reference", "name", "a"),
        ("image_url", "image_url", {"url": URL}),
        ("image_url", "image_url", {"url": URL, "detail": "low"}),
        (PICTURE, "image_url", URL),
        ("audio_url", "audio_url", {"url": URL}),
        ("video_url", "video_url", {"url": URL}),
        *[("input_audio", "input_audio", {"data": "A", "format": f}) for f in ("wav", "", None)],
        ("input_audio", "input_audio", {"data": "A"}),
    ]
]
"""A part of each kind, to which a client adds fields."""
EMPTY: tuple[Any, ...] = (None, "", {})
ADDED: list[dict[str, Any]] = [
    {},
    dict.fromkeys(OTHERS),
    *[{key: value} for key in OTHERS for value in EMPTY if key != "uuid" or value is None],
    *[{key: {"url": None}} for key in MODALITY],
    *[{key: {"url": ""}} for key in MODALITY],
    {"language": "de", "cache_control": {"type": "ephemeral"}},
    {"uuid": "u", "language": "de"},
    *[{"detail": detail} for detail in ("high", "auto")],
]
"""Fields that typed clients, or clients of a chat template, write beside those of the kind."""


def check_alike(
    validated: Callable[[Any], Any], endpoint: Any = CHAT, field: str = "content"
) -> set[str]:
    """Check that the proxy takes each part as vLLM does, and sends on what the template reads.

    Return vLLM's types of the accepted parts.
    """
    accepted = set[str]()
    for kept in FULL:
        for more in ADDED:
            part = {"detail": "auto", **more, **kept} if kept["type"] == PICTURE else more | kept
            kind, read = read_by_vllm(validated, part)
            if kind == "refused" or ("uuid" in more and kind in TEXTS and more["uuid"]):
                continue
            accepted.add(kind)
            found, item = by_proxy(part, endpoint, field)
            assert found == ("image_url" if kind == PICTURE else kind), part
            if item is None:
                continue
            item = item.with_key("k")
            name = "messages" if endpoint is CHAT else "input"
            body = {name: [{"role": "user", field: [part]}]}
            for form in (raw_part(item), metadata_part(item, {"grid": [1]}, "k")):
                [sent] = with_parts(body, {item: form})[name][0][field]
                kind, again = read_by_vllm(validated, sent)
                assert kind == (item.kind if item.kind in form else f"{item.modality}_embeds"), sent
                assert extra_fields(again) == extra_fields(read), part
    return accepted


def test_a_part_with_fields_of_other_parts_is_to_vllm_what_its_type_says() -> None:
    assert check_alike(chat_part) == {*TEXTS, *MODALITY, PICTURE}


@pytest.mark.parametrize("field", ["content", "output"])
def test_a_part_of_a_response_with_other_fields_is_to_vllm_what_its_type_says(field: str) -> None:
    def validated(part: Any) -> Any:
        return response_part(part, of_tool=field == "output")

    assert {"input_text", PICTURE} <= check_alike(validated, RESPONSES, field)


def test_every_block_of_vllms_is_accepted() -> None:
    block = loaded("vllm.entrypoints.anthropic.protocol").AnthropicContentBlock

    assert set(get_args(block.model_fields["type"].annotation)) == BLOCKS


@pytest.mark.parametrize("in_result", [False, True])
def test_pictures_of_messages_are_those_that_vllm_finds(in_result: bool) -> None:
    request = loaded("vllm.entrypoints.anthropic.protocol").AnthropicMessagesRequest
    convert = loaded("vllm.entrypoints.anthropic.serving").AnthropicServingMessages
    data: dict[str, Any] = {"data": "MQ=="}
    url = {"type": "url", "url": "https://a/b"}
    sources = [data, url, *[{**data, "type": kind} for kind in ("base64", None)]]
    sources += [{**data, "media_type": kind} for kind in ("image/png", "image/jpg")]
    for place in [*sources, *([] if in_result else [None, {}])]:
        content: list[Any] = [{"type": "image", "source": place}, {"type": "text", "text": "a"}]
        if in_result:
            content = [{"type": "tool_result", "tool_use_id": "1", "content": content}]
        body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
        messages = convert.to_chat_completion_request(request(**body)).messages
        found = [list(message["content"]) for message in messages]
        urls = [part["image_url"]["url"] for one in found for part in one if "image_url" in part]
        ours = [
            item.part["image_url"]["url"] for item in MESSAGES.items(MESSAGES.parse(dumps(body)))
        ]
        assert urls == ours, place


KINDS = [*sorted(TEXTS), *MODALITY, PICTURE, *REFUSED]
kinds = st.sampled_from([*KINDS, *MODALITY, *MODALITY, "file", None, 0, ""])
keys = st.sampled_from([*MODALITY, *MODALITY, *REFUSED, "tool_reference", "text", "data", "uuid"])
values = st.sampled_from(
    ["http://a/b", {"url": "http://a/b"}, {"data": "AAAA", "format": "wav"}, None, "u", 1]
)
parts = st.builds(
    lambda kind, more: more if kind == "" else {"type": kind, **more},
    kinds,
    st.dictionaries(keys, values, max_size=3),
)


@pytest.mark.fault(74)
@pytest.mark.security("S26")
@settings(max_examples=1000, deadline=None)
@given(part=parts)
def test_vllm_and_the_proxy_read_parts_alike(part: dict[str, Any]) -> None:
    """The part has the proxy's key, as an instance receives it; text parts are unchanged."""
    parse = vllms_parser()
    body = {"messages": [{"role": "user", "content": [part]}]}
    try:
        items = list(CHAT.items(body))
        if any(isinstance(source(item), Known) for item in items):
            return  # without media: such a part is never forwarded unchanged
    except BadRequest:
        return
    sent = with_parts(body, {item: raw_part(replace(item, content_key="k")) for item in items})
    [sent_part] = sent["messages"][0]["content"]
    try:
        kind, _ = parse(sent_part)
    except Exception:  # noqa: BLE001 - any kind of rejection is fine
        return

    assert kind == (items[0].kind if items else kind)
    assert bool(items) == (kind not in TEXTS)
