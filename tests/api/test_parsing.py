import gc
from contextlib import suppress

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.api import body
from epd.errors import BadRequest


@pytest.mark.fault(65)
def test_parsing_disables_garbage_collection() -> None:
    """A collection per 700 new lists would visit all earlier ones, and block the event loop."""
    raw = b"[%s 1]" % (b"[]," * (body.MAX_CONTAINERS - 1))
    begun: list[str] = []

    def count(phase: str, _: dict[str, int]) -> None:
        begun.append(phase)

    gc.collect()
    gc.callbacks.append(count)
    try:
        body.parse_json(raw)
        # One collection follows when the collector is enabled again.
        assert begun.count("start") <= 1
    finally:
        gc.callbacks.remove(count)


@pytest.mark.fault(65)
@pytest.mark.parametrize(
    "raw", [b"{}", b"{", b"[" * body.MAX_DEPTH + b"[]" + b"]" * body.MAX_DEPTH]
)
def test_garbage_is_collected_again_once_a_body_is_read_or_refused(raw: bytes) -> None:
    with suppress(BadRequest):
        body.parse_json(raw)

    assert gc.isenabled()


def values(value: object) -> tuple[int, int, int]:
    """Return the numbers of values, of lists and objects, and of empty ones."""
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
def test_values_in_strings_are_not_counted(value: object) -> None:
    every, containers, empty = values(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "MAX_CONTAINERS", 2)
        patch.setattr(body, "MAX_VALUES", 6)
        try:
            body.parse_json(orjson.dumps(value))
        except BadRequest:
            assert containers > 2 or every + empty > 6
        else:
            assert containers <= 2
            assert every <= 6


@pytest.mark.fault(49)
@pytest.mark.parametrize(("limit", "times"), [(10**6, 2), (10**5, 1)])
def test_errors_of_a_large_body_are_not_searched_in_its_media(limit: int, times: int) -> None:
    """To locate an error in the whole body, its media would be parsed too."""
    raw = b'{"x": "data:image/png;base64,%s", "y": }' % (b"A" * 500_000)
    sizes: list[int] = []

    def parse(rest: bytes | bytearray) -> object:
        sizes.append(len(rest))
        return body.parse_json(rest)

    with pytest.raises(BadRequest):
        body.cut_and_parsed(raw, parse, limit)

    assert len(sizes) == times
    assert sizes[0] < 200


@pytest.mark.parametrize(
    "raw",
    [rb'"\ud83d"', rb'"\ude00"', rb'"\ude00\ud83d"', rb'{"\ud83d": 1}', b'"\xed\xa0\xbd"'],
)
def test_half_a_surrogate_pair_is_refused(raw: bytes) -> None:
    """UTF-8 cannot encode it, so such a body could not be forwarded to an instance."""
    with pytest.raises(BadRequest) as refused:
        body.parse_json(raw)

    assert refused.value.slug == "invalid_json"
    assert body.parse_json(rb'"\ud83d\ude00"') == "\U0001f600"


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**40, 2**64 - 1, -(2**63), 7])
def test_integers_of_any_size_are_exact(number: int) -> None:
    raw = b'{"tools": [{"maximum": %d, "text": "%d", "most": 1.5}]}' % (number, number)
    value = body.parse_json(raw)

    assert value == {"tools": [{"maximum": number, "text": str(number), "most": 1.5}]}
    assert type(value["tools"][0]["maximum"]) is int
    assert body.dump_json(value) == raw.replace(b" ", b"")
