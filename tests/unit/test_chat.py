import gc
from contextlib import suppress

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.bodies import chat
from epd.errors import BadRequest
from tests.requests import image, input_audio, request, text

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
part_like = st.dictionaries(
    st.sampled_from([*chat.MODALITY, *chat.EMBEDS, "type", "uuid", "text", "url"]),
    json_values | st.sampled_from([*chat.MODALITY, "text"]),
)


@pytest.mark.fault(52)
@given(json_values | st.lists(st.dictionaries(st.just("content"), st.lists(part_like))))
def test_any_messages_are_read_or_refused(messages: object) -> None:
    try:
        raw = orjson.dumps({"messages": messages})
    except TypeError:  # an integer over 64 bits
        return
    try:
        items = chat.mm_items(chat.parse(raw))
    except BadRequest as error:
        assert error.status == 400
    else:
        assert all(item.kind in chat.MODALITY for item in items)


@pytest.mark.fault(50)
@given(st.binary())
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    try:
        chat.parse(raw)
    except BadRequest as error:
        assert error.status == 400


@pytest.mark.fault(65)
def test_no_garbage_is_looked_for_among_what_is_parsed() -> None:
    """A collection for each 700 new lists would go over all that came before, and hold the loop."""
    raw = b"[%s 1]" % (b"[]," * (chat.MAX_CONTAINERS - 1))
    begun: list[str] = []

    def count(phase: str, _: dict[str, int]) -> None:
        begun.append(phase)

    gc.collect()
    gc.callbacks.append(count)
    try:
        chat.parse_json(raw)
        # What comes once it is allowed again is one.
        assert begun.count("start") <= 1
    finally:
        gc.callbacks.remove(count)


@pytest.mark.fault(65)
@pytest.mark.parametrize(
    "raw", [b"{}", b"{", b"[" * chat.MAX_DEPTH + b"[]" + b"]" * chat.MAX_DEPTH]
)
def test_garbage_is_collected_again_once_a_body_is_read_or_refused(raw: bytes) -> None:
    with suppress(BadRequest):
        chat.parse_json(raw)

    assert gc.isenabled()


def values(value: object) -> tuple[int, int, int]:
    """How many values there are, how many lists and objects, and how many empty ones."""
    if not isinstance(value, list | dict):
        return 1, 0, 0
    inner = [values(one) for one in (value.values() if isinstance(value, dict) else value)]
    every, containers, empty = map(sum, zip(*inner, strict=True)) if inner else (0, 0, 1)
    return every + 1, containers + 1, empty


@pytest.mark.fault(50)
@given(
    st.recursive(
        st.integers(0, 9) | st.text(',[{"\\', max_size=9),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(',[{"\\'), inner),
    )
)
def test_values_are_counted_and_not_what_words_look_like(value: object) -> None:
    every, containers, empty = values(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "MAX_CONTAINERS", 2)
        patch.setattr(chat, "MAX_VALUES", 6)
        try:
            chat.parse_json(orjson.dumps(value))
        except BadRequest:
            assert containers > 2 or every + empty > 6
        else:
            assert containers <= 2
            assert every <= 6


def test_items_say_where_they_stand() -> None:
    body = {"messages": [{"content": "a"}, {"content": [text(), image(), input_audio()]}]}
    items = chat.mm_items(body)

    assert [(item.modality, item.param) for item in items] == [
        ("image", "messages[1].content[1]"),
        ("audio", "messages[1].content[2]"),
    ]


def test_an_item_knows_what_its_client_calls_it() -> None:
    items = chat.mm_items(request(image(uuid="cat:1"), image(uuid=None), image()))

    assert [item.uuid for item in items] == ["cat:1", None, None]


def test_with_parts_replaces_those_parts_and_shares_the_rest() -> None:
    body = request(text(), image(b"1"), image(b"2"), seed=1)
    before = request(text(), image(b"1"), image(b"2"), seed=1)
    first, second = chat.mm_items(body)
    changed = chat.with_parts(body, {second: text("new")})

    assert changed["messages"][0]["content"] == [text(), image(b"1"), text("new")]
    assert changed["messages"][0]["content"][1] is first.part
    assert body == before


def test_prefill_body_asks_for_one_token_and_keeps_the_prompt() -> None:
    body = request(text(), stream=True, max_tokens=9, min_tokens=2, stream_options={}, seed=1)
    prefill = chat.prefill_body(body, {"do_remote_decode": True})

    assert prefill == {
        "model": "m",
        "messages": body["messages"],
        "seed": 1,
        "stream": False,
        "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True},
    }


def test_metadata_is_flat_per_item() -> None:
    [item] = chat.mm_items(request(image()))
    part = chat.metadata_part(item, {"image_grid_thw": [[1, 36, 54]], "n": [5]}, "key")

    assert part == {
        "type": "image_embeds",
        "image_embeds": {"image_grid_thw": [1, 36, 54], "n": [5]},
        "uuid": "key",
    }


@pytest.mark.fault(56)
@pytest.mark.security("S5")
@pytest.mark.parametrize("field", chat.RESERVED)
def test_reserved_fields_are_dropped(field: str) -> None:
    assert field not in chat.parse(b'{"messages": [], "%s": {}}' % field.encode())


@pytest.mark.fault(51)
def test_the_last_of_duplicate_keys_wins_for_all() -> None:
    assert chat.parse(b'{"messages": [], "a": 1, "a": 2}')["a"] == 2
