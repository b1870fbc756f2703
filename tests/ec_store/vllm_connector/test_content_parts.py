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

from epd.api.endpoints import ENDPOINTS
from epd.api.items import MODALITY, PICTURE, REFUSED, TEXTS, raw_part, with_parts
from epd.api.messages import BLOCKS
from epd.errors import BadRequest
from epd.media.parts import Known, source

CHAT = ENDPOINTS["/v1/chat/completions"]


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


def by_vllm(part: Any) -> str:
    """Return vLLM's type of a chat's part, `named` without media, or `refused`."""
    request = loaded("vllm.entrypoints.openai.chat_completion.protocol").ChatCompletionRequest
    body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    try:
        [message] = request.model_validate(body).messages
        [read] = message["content"]
        kind, content = vllms_parser()(read)
    except (ValueError, TypeError, AttributeError):  # raised by its parsers and by pydantic
        return "refused"
    media = content.get("data") if isinstance(content, dict) else content
    if kind in {*MODALITY, PICTURE} and not media:
        return "named" if read.get("uuid") is not None else "refused"
    return kind


def by_proxy(part: Any) -> str:
    body = {"messages": [{"role": "user", "content": [part]}]}
    try:
        CHAT.check(body)
        items = list(CHAT.items(body))
        named = any(isinstance(source(item), Known) for item in items)
    except BadRequest:
        return "refused"
    return "named" if named else items[0].kind if items else str(part["type"])


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
        assert kind == "refused" or by_proxy(part) == expected, part

    assert {*accepted} == {*TEXTS, *MODALITY, PICTURE, "named"}


def test_every_block_of_vllms_is_accepted() -> None:
    block = loaded("vllm.entrypoints.anthropic.protocol").AnthropicContentBlock

    assert set(get_args(block.model_fields["type"].annotation)) == BLOCKS


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
