"""Content parts of a request: which are allowed, and how each is classified."""

from dataclasses import fields, replace
from typing import Any

import orjson
import pytest

from epd.api.endpoints import ENDPOINTS
from epd.api.items import (
    MODALITY,
    REFUSED,
    TEXTS,
    Form,
    MMItem,
    metadata_part,
    raw_part,
    with_parts,
)
from epd.api.messages import BLOCKS, RESULTS
from epd.errors import BadRequest
from epd.media.parts import Inline, Known, source
from tests.requests import audio_url, data_url, image, input_audio, text, video

URL = data_url(b"picture")
PICTURE = {"type": "image", "source": {"type": "url", "url": URL}}
CONVERSATIONS = ["/v1/chat/completions", "/tokenize", "/v1/embeddings"]


def items(path: str, parts: list[Any]) -> list[MMItem]:
    messages = [{"role": "user", "content": parts}]
    endpoint = ENDPOINTS[path]
    field = "input" if path == "/v1/responses" else "messages"
    return list(endpoint.items(endpoint.parse(orjson.dumps({field: messages}))))


def refusal(path: str, part: Any) -> BadRequest:
    with pytest.raises(BadRequest) as refused:
        items(path, [part])
    return refused.value


@pytest.mark.parametrize("kind", sorted(TEXTS))
@pytest.mark.parametrize("path", [*CONVERSATIONS, "/v1/responses"])
def test_text_is_accepted_by_every_name_that_vllm_has_for_it(path: str, kind: str) -> None:
    part: dict[str, Any] = {
        "type": kind,
        "text": "a",
        "name": "n",
        "cache_control": {},
        "uuid": None,
    }

    assert items(path, [part]) == []


@pytest.mark.fault(74)
@pytest.mark.security("S26")
@pytest.mark.parametrize("kind", ["point_cloud_url", "file", "input_file", "document", "", "Text"])
@pytest.mark.parametrize("path", [*CONVERSATIONS, "/v1/responses", "/v1/messages"])
def test_a_part_of_an_unknown_type_is_refused(path: str, kind: str) -> None:
    error = refusal(path, {"type": kind, "text": "a", "file_url": "http://169.254.169.254/"})

    field = "input" if path == "/v1/responses" else "messages"
    assert (error.status, error.slug) == (400, "unknown_content_part")
    assert error.param == f"{field}[0].content[0].type"
    assert kind == "" or repr(kind) not in error.message  # not in the message, which is logged


@pytest.mark.fault(74)
@pytest.mark.security("S26")
@pytest.mark.parametrize("kind", [0, [], {}, True, ["text"]])
@pytest.mark.parametrize("path", [*CONVERSATIONS, "/v1/responses", "/v1/messages"])
def test_a_type_that_is_not_a_string_is_rejected(path: str, kind: Any) -> None:
    assert refusal(path, {"type": kind, "text": "a"}).status == 400


@pytest.mark.fault(74)
@pytest.mark.security("S26")
@pytest.mark.parametrize(
    "key", ["prompt_embeds", "image_embeds", "audio_embeds", "video_embeds", "image_pil"]
)
@pytest.mark.parametrize("path", [*CONVERSATIONS, "/v1/responses"])
def test_a_part_that_clients_must_not_send_is_refused_wherever_it_hides(
    path: str, key: str
) -> None:
    for part in (
        {"type": key, key: "AAAA", "data": "AAAA"},
        {key: "AAAA", "data": "AAAA"},
        {"type": None, key: None, "uuid": "u"},
        {"tool_reference": 1, "name": "n", key: 1, "data": "AAAA"},
        {**text(), key: "AAAA"},
        {**input_audio(), key: 1, "data": "AAAA"},
        {**image(), "uuid": "u", key: "AAAA"},
        {"type": "input_image", "image_url": URL, key: "AAAA"},
    ):
        assert refusal(path, part).status == 400


@pytest.mark.parametrize("path", CONVERSATIONS)
@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"image_url": URL}, "image_url"),
        ({"image_url": {"url": URL}}, "image_url"),
        ({"audio_url": URL, "type": None}, "audio_url"),
        ({"video_url": URL, "uuid": "u"}, "video_url"),
        ({"image_url": None, "uuid": "u"}, "image_url"),
        ({"input_audio": {"data": "AAAA", "format": "wav"}}, "input_audio"),
        ({"type": "input_image", "image_url": URL, "detail": "auto"}, "image_url"),
        ({"type": "input_image", "image_url": URL, "uuid": "u"}, "image_url"),
        ({"type": "input_image", "uuid": "u"}, "image_url"),
        ({"type": "image_url", "image_url": URL, "uuid": "u"}, "image_url"),
        ({"type": "audio_url", "audio_url": URL, "uuid": "u"}, "audio_url"),
        ({"type": "input_image", "image_url": {"url": URL}, "uuid": "u"}, "image_url"),
        ({"type": "image_url", "image_url": {"url": URL}, "uuid": None}, "image_url"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, "input_audio"),
    ],
)
def test_a_media_part_is_found_in_every_spelling_of_vllms(
    path: str, part: dict[str, Any], kind: str
) -> None:
    [item] = items(path, [part])

    assert (item.kind, item.part["type"], item.uuid) == (kind, kind, part.get("uuid"))
    if kind == "input_audio":
        assert item.part[kind] == part[kind]
    elif part.get(kind):
        assert item.part[kind] == {"url": URL}


@pytest.mark.parametrize("path", CONVERSATIONS)
@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": None}, "uuid": "u"},
        {"type": "image_url", "image_url": {}, "uuid": "u"},
        {"type": "input_image", "image_url": {"url": None}, "uuid": "u"},
        {"type": "video_url", "video_url": {"url": ""}, "uuid": "u"},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}, "uuid": "u"},
        {"input_audio": {"format": "wav"}, "uuid": "u"},
    ],
)
def test_media_that_are_empty_beside_a_name_are_named(path: str, part: dict[str, Any]) -> None:
    [item] = items(path, [part])

    assert source(item) == Known("u")


EMPTY: list[Any] = [None, "", {}, []]
OF_ALL = {**dict.fromkeys([*MODALITY, *REFUSED, "uuid", "detail", "refusal", "file_id"])}
"""Fields of every kind of part, as a typed client writes them that knows all kinds."""


@pytest.mark.parametrize(
    ("key", "empty"),
    [
        *[(key, empty) for key in (*MODALITY, *REFUSED) for empty in EMPTY],
        *[(key, {"url": empty, "data": empty}) for key in MODALITY for empty in (None, "")],
    ],
)
@pytest.mark.parametrize("path", [*CONVERSATIONS, "/v1/responses", "/v2/embed"])
def test_an_empty_field_of_media_is_no_media(path: str, key: str, empty: Any) -> None:
    if path == "/v2/embed":
        endpoint, part = ENDPOINTS[path], {**text(), key: empty}
        body = endpoint.parse(orjson.dumps({"inputs": [{"content": [part]}]}))
        assert list(endpoint.items(body)) == []
    else:
        assert items(path, [{"type": "input_text", "text": "a", key: empty}]) == []


@pytest.mark.parametrize("path", CONVERSATIONS)
@pytest.mark.parametrize("part", [image(URL), input_audio(), video(), audio_url()])
def test_a_media_part_with_every_field_is_what_its_type_says(
    path: str, part: dict[str, Any]
) -> None:
    """No field of other media may be sent: keys decide how vLLM reads a part with a uuid."""
    kind = part["type"]
    value = {**part[kind], "format": part[kind].get("format"), "detail": None}
    [item] = items(path, [{**OF_ALL, "type": kind, kind: value}])
    sent = raw_part(item.with_key("k"))

    assert (item.kind, item.uuid) == (kind, None)
    assert sent.keys().isdisjoint({*MODALITY, *REFUSED} - {kind})
    assert (sent[kind], sent["uuid"]) == (part[kind], "k")


@pytest.mark.parametrize("path", [*CONVERSATIONS, "/v1/responses"])
def test_a_picture_of_a_response_with_every_field_is_a_picture(path: str) -> None:
    part = {**OF_ALL, "type": "input_image", "image_url": URL}
    [item] = items(path, [part])

    assert item.uuid is None
    assert item.part == {
        "type": "image_url",
        "image_url": {"url": URL},
        "refusal": None,
        "file_id": None,
    }


@pytest.mark.parametrize("path", CONVERSATIONS)
def test_an_empty_uuid_names_nothing(path: str) -> None:
    """To an engine it would be one name for all pictures."""
    for part in (image(URL), {"image_url": URL}, {"type": "input_image", "image_url": URL}):
        [item] = items(path, [{**part, "uuid": ""}])
        assert (item.uuid, item.part["image_url"]) == (None, {"url": URL})
    assert refusal(path, {**text(), "uuid": ""}).slug == "reserved_field"


@pytest.mark.parametrize("value", [None, "", "wav", "x-m4a", ...])
def test_a_sound_of_any_format_or_none_is_a_sound(value: Any) -> None:
    data = {"data": "AAAA"} if value is ... else {"data": "AAAA", "format": value}
    [item] = items("/v1/chat/completions", [{"type": "input_audio", "input_audio": data}])

    assert isinstance(source(item), Inline)


FOR_TEMPLATE = {"language": "de", "cache_control": {"type": "ephemeral"}, "detail": "high"}


@pytest.mark.parametrize("path", [*CONVERSATIONS, "/v1/responses"])
@pytest.mark.parametrize("uuid", [{}, {"uuid": "own"}])
def test_fields_for_the_chat_template_are_sent_in_every_form(path: str, uuid: Any) -> None:
    """A template gets every field that vLLM does not know (`_collect_extra_fields`)."""
    spellings: list[Any] = [{"type": "input_image", "image_url": URL}]
    if path != "/v1/responses":
        spellings += [image(URL), {"image_url": {"url": URL}}, {"video_url": {"url": URL}}]
        spellings += [input_audio(), audio_url()]
    field = "input" if path == "/v1/responses" else "messages"
    for spelling in spellings:
        part = {**spelling, **FOR_TEMPLATE, **uuid}
        endpoint = ENDPOINTS[path]
        body = endpoint.parse(orjson.dumps({field: [{"role": "user", "content": [part]}]}))
        [item] = [item.with_key("key") for item in endpoint.items(body)]
        for form in (raw_part(item), metadata_part(item, {"grid": [[1, 2, 2]]}, "key")):
            [sent] = with_parts(body, {item: form})[field][0]["content"]
            assert sent["uuid"] == "key"
            assert FOR_TEMPLATE.items() <= sent.items()
            assert len(sent.keys() & {*MODALITY, *REFUSED}) == 1


@pytest.mark.fault(74)
@pytest.mark.parametrize("path", CONVERSATIONS)
def test_a_part_with_only_a_url_is_rejected_where_vllm_rejects_it(path: str) -> None:
    """With a type and without a `uuid`, vLLM's API requires the object form."""
    [item] = items(path, [{"type": "image_url", "image_url": URL}])
    with pytest.raises(BadRequest):
        source(item)


@pytest.mark.parametrize("path", CONVERSATIONS)
@pytest.mark.parametrize("part", [{}, {"text": "a"}, {"type": None}, {"url": URL}, {"uuid": "u"}])
def test_a_part_without_a_type_that_vllm_refuses_is_refused(path: str, part: Any) -> None:
    assert refusal(path, part).param == "messages[0].content[0]"


def test_a_part_without_a_type_is_one_thing_only() -> None:
    two = {"image_url": URL, "video_url": URL}

    assert refusal("/v1/chat/completions", two).param == "messages[0].content[0]"


@pytest.mark.parametrize("kind", ["reasoning_text", "summary_text"])
def test_the_text_of_reasoning_items_is_accepted(kind: str) -> None:
    assert items("/v1/responses", [{"type": kind, "text": "a"}]) == []


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_blocks_that_vllm_accepts_are_accepted(kind: str) -> None:
    block = PICTURE if kind == "image" else {"type": kind, "text": "a"}

    assert len(items("/v1/messages", [block])) == (kind == "image")


def test_blocks_that_vllm_ignores_in_a_tool_result_are_dropped() -> None:
    ignored = [{"type": kind, "source": {"data": "A"}} for kind in ("document", "search_result")]
    content = [ignored[0], {"type": "text", "text": "a"}, ignored[1], PICTURE]
    result = {"type": "tool_result", "tool_use_id": "t", "content": content}
    endpoint = ENDPOINTS["/v1/messages"]
    body = endpoint.parse(orjson.dumps({"messages": [{"role": "user", "content": [result]}]}))

    assert {"text", "image"} <= RESULTS
    assert body["messages"][0]["content"][0]["content"] == [{"type": "text", "text": "a"}, PICTURE]
    [item] = endpoint.items(body)
    assert item.path == ("messages", 0, "content", 0, "content", 1)


@pytest.mark.fault(74)
@pytest.mark.parametrize("block", [PICTURE, {"type": "document"}, {"text": "a"}, "a", None, 1])
def test_a_system_prompt_is_text(block: Any) -> None:
    endpoint = ENDPOINTS["/v1/messages"]
    system = [{"type": "text", "text": "a"}, block]
    with pytest.raises(BadRequest) as refused:
        endpoint.parse(orjson.dumps({"messages": [], "system": system}))

    assert refused.value.param == "system[1].type"
    endpoint.parse(orjson.dumps({"messages": [], "system": system[:1]}))
    endpoint.parse(orjson.dumps({"messages": [], "system": "a"}))


def test_an_item_with_its_key_keeps_all_else() -> None:
    item = MMItem(
        ("messages", 0), "image_url", {"type": "image_url"}, Form(dict, "url", named=True)
    )
    keyed = replace(item, content_key="k", pixels=3)

    assert all(
        getattr(item.with_key("k", 3), field.name) == getattr(keyed, field.name)
        for field in fields(MMItem)
    )
