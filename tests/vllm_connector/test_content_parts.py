"""Content parts as the proxy reads them, beside what the installed vLLM makes of them."""

import importlib
import warnings
from importlib.util import find_spec
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.bodies.endpoints import ENDPOINTS
from epd.bodies.items import MODALITY, PICTURE, REFUSED, TEXTS, raw_part, with_parts
from epd.bodies.messages import BLOCKS
from epd.errors import BadRequest
from epd.media.parts import Known, source

CHAT = ENDPOINTS["/v1/chat/completions"]


def loaded(name: str) -> Any:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: scripts/test.sh does it")
    with warnings.catch_warnings(action="ignore"):
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def chat_utils() -> Any:
    return loaded("vllm.renderers.chat_utils")


def test_every_part_of_vllms_is_accepted_or_refused_on_purpose(chat_utils: Any) -> None:
    known = {*TEXTS, *MODALITY, PICTURE, *REFUSED}

    assert set(chat_utils.MM_PARSER_MAP) == known


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
def test_a_part_is_to_vllm_what_it_is_to_the_proxy(part: dict[str, Any]) -> None:
    """With a key of the proxy's, as an instance is sent it, and where it is text, as it came."""
    parse = vars(loaded("vllm.renderers.chat_utils"))["_parse_chat_message_content_mm_part"]
    body = {"messages": [{"role": "user", "content": [part]}]}
    try:
        items = list(CHAT.items(body))
        if any(isinstance(source(item), Known) for item in items):
            return  # such a part is never sent as it came: it has no media
    except BadRequest:
        return
    sent = with_parts(body, {item: raw_part(item, "k") for item in items})
    [sent_part] = sent["messages"][0]["content"]
    try:
        kind, _ = parse(sent_part)
    except Exception:  # noqa: BLE001 - however vLLM refuses it, nothing of it is read
        return

    assert kind == (items[0].kind if items else kind)
    assert bool(items) == (kind not in TEXTS)
