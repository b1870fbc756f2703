import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.api import items
from epd.api.chat import CHAT
from epd.errors import BadRequest
from tests.requests import image, request

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=10,
)
part_like = st.dictionaries(
    st.sampled_from([*items.MODALITY, *items.EMBEDS, "type", "uuid", "text", "url"]),
    json_values | st.sampled_from([*items.MODALITY, "text"]),
)


@pytest.mark.fault(52)
@given(json_values | st.lists(st.dictionaries(st.just("content"), st.lists(part_like))))
def test_any_messages_are_read_or_refused(messages: object) -> None:
    try:
        raw = orjson.dumps({"messages": messages})
    except TypeError:  # an integer over 64 bits
        return
    try:
        found = tuple(CHAT.items(CHAT.parse(raw)))
    except BadRequest as error:
        assert error.status == 400
    else:
        assert all(item.kind in items.MODALITY for item in found)


@pytest.mark.fault(50)
@given(st.binary())
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    try:
        CHAT.parse(raw)
    except BadRequest as error:
        assert error.status == 400


def test_metadata_is_flat_per_item() -> None:
    [item] = CHAT.items(request(image()))
    part = items.metadata_part(item, {"image_grid_thw": [[1, 36, 54]], "n": [5]}, "key")

    assert part == {
        "type": "image_embeds",
        "image_embeds": {"image_grid_thw": [1, 36, 54], "n": [5]},
        "uuid": "key",
    }
