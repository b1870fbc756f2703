"""Bodies: cuts of their media, which are put back when one is written, and what is no JSON."""

import gc
from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.api import body
from epd.api.body import (
    NO_CUTS,
    PLACEHOLDER_LENGTH,
    WINDOW,
    cut_and_parsed,
    cut_media,
    parse_object,
    pieces,
)
from epd.api.endpoints import ENDPOINTS
from epd.api.items import MMItem
from epd.errors import BadRequest
from epd.media.parts import Inline, source

BASE64 = b"QUJD" * WINDOW
HEADS = (b"data:image/png;base64,", b"DATA:;base64,", b"data:audio/ogg;codecs=opus;base64,")
AROUND = st.lists(
    st.sampled_from([b'"', b"\\", b"\\\\", b'\\"', b" ", b",", b"{", b"}", b"[", b"]", b":", b"1"])
    | st.sampled_from(
        [b'"url":', b'"data":"', b'"data": "', *HEADS, BASE64, BASE64[: WINDOW // 2]]
    ),
    max_size=24,
)


STRINGS = st.sampled_from(
    [*(head + BASE64 for head in HEADS), BASE64, b"data:image/png;base64,", b"a", b'"', b"\\", b""]
).map(bytes.decode)
DOCUMENTS = st.recursive(
    STRINGS | st.integers(0, 9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["url", "data"]) | STRINGS, inner, max_size=3)
    ),
    max_leaves=6,
)
BROKEN = st.sampled_from([b"", b'"', b"\\", b"{", b",", b" " * 3 * WINDOW, b"1" * 3 * WINDOW])


def written(raw: bytes) -> bytes:
    rest, cuts = cut_media(raw)
    return b"".join(pieces(bytes(rest), cuts))


def url(text: bytes) -> str:
    return (HEADS[0] + text).decode()


@given(AROUND.map(b"".join))
def test_any_body_is_put_together_again(raw: bytes) -> None:
    assert written(raw) == raw


def loaded(raw: bytes | bytearray) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None


@given(DOCUMENTS.map(orjson.dumps), BROKEN, st.floats(0, 1))
def test_a_body_without_its_media_is_json_exactly_if_the_body_is(
    raw: bytes, broken: bytes, where: float
) -> None:
    at = int(where * len(raw))
    raw = raw[:at] + broken + raw[at:]
    rest, cuts = cut_media(raw)
    value = loaded(rest)

    assert (value is None) == (loaded(raw) is None)
    if value is not None:
        assert loaded(b"".join(pieces(orjson.dumps(value), cuts))) == loaded(raw)


@given(st.lists(st.sampled_from([0, 1, WINDOW // 2, 2 * WINDOW, 5 * WINDOW + 3]), max_size=4))
def test_all_media_of_a_body_are_cut_and_keep_their_places(sizes: list[int]) -> None:
    texts = [bytes([65 + n]) * size for n, size in enumerate(sizes)]
    audio = {"input_audio": {"data": "x" * 3 * WINDOW, "format": "wav"}}
    body = {"first": [{"image_url": {"url": url(text)}} for text in texts], "last": audio}
    rest, cuts = cut_media(orjson.dumps(body))
    value = orjson.loads(rest)

    found = [source(MMItem((), "image_url", part), cuts=cuts) for part in value["first"]]
    assert found == [Inline("image/png", text) for text in texts]
    sound = source(MMItem((), "input_audio", value["last"]), cuts=cuts)
    assert sound == Inline("audio/wav", b"x" * 3 * WINDOW)
    assert len(cuts) == 1 + sum(size >= 2 * WINDOW for size in sizes)
    assert len(rest) < 3 * WINDOW


def test_a_part_used_twice_or_elsewhere_is_written_at_every_place() -> None:
    rest, cuts = cut_media(orjson.dumps({"messages": [url(BASE64)]}))
    value = orjson.loads(rest)
    body = {"again": value["messages"], "not": 1, "messages": value["messages"]}

    assert loaded(b"".join(pieces(orjson.dumps(body), cuts))) == {
        "again": [url(BASE64)],
        "not": 1,
        "messages": [url(BASE64)],
    }


@pytest.mark.parametrize("space", ["", " ", "\r\n\t "])
def test_the_key_of_an_object_is_stable(space: str) -> None:
    """Otherwise two spellings of a key would differ, and an engine might read the other one."""
    raw = f'{{"data": {{"{url(BASE64)}"{space}: 1}}}}'.encode()

    assert cut_media(raw) == (raw, NO_CUTS)


AUDIO = {"type": "input_audio", "input_audio": {"data": "DATA", "format": "wav"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "TYPE", "data": "DATA"}}


@pytest.mark.parametrize("size", [1, 5 * WINDOW])
@pytest.mark.parametrize(
    ("path", "part", "kind", "head"),
    [
        ("/v1/chat/completions", AUDIO, "", "data:audio/wav;base64,"),
        ("/v1/messages", IMAGE, "image/png", "data:image/png;base64,"),
        ("/v1/messages", IMAGE, "image/png;base64,QUJD", ""),
    ],
)
def test_media_that_are_not_base64_get_no_key(
    path: str, part: dict[str, Any], kind: str, head: str, size: int
) -> None:
    """Otherwise the cache key would be that of the placeholder, which differs each time."""
    endpoint = ENDPOINTS[path]
    message = {"role": "user", "content": [part]}
    raw = orjson.dumps({"model": "m", "max_tokens": 1, "messages": [message]})
    text = head.encode() + b"QUJD" * size
    raw = raw.replace(b"DATA", text).replace(b"TYPE", kind.encode())
    body, cuts, _ = endpoint.read(raw, "application/json", 2**20)
    [item] = endpoint.items(body)

    with pytest.raises(BadRequest) as refused:
        source(item, cuts=cuts)
    assert refused.value.slug == "invalid_media"


ESCAPES = [
    (b"/", rb"\/"),
    (b"/", rb"\u002F"),
    (b"/", rb"\u002f"),
    (b"+", rb"\u002B"),
    (b"+", rb"\u002b"),
    (b"=", rb"\u003D"),
    (b"=", rb"\u003d"),
]
SLASHED = b"Q/J+" * 2 * WINDOW + b"QQ=="


@pytest.mark.parametrize("escapes", [[escape] for escape in ESCAPES] + [ESCAPES[:1] + ESCAPES[3:]])
def test_media_are_cut_without_the_escapes_of_their_client(
    escapes: list[tuple[bytes, bytes]],
) -> None:
    """Serializers of PHP and Swift escape slashes, and those of .NET and Gson `+` or `=`."""
    head = b"data:image/svg+xml;a=b;base64,"
    sound = {"data": SLASHED.decode(), "format": "wav"}
    body = {"url": (head + SLASHED).decode(), "input_audio": sound}
    plain = escaped = orjson.dumps(body)
    for character, escape in escapes:
        escaped = escaped.replace(character, escape)
    rest, cuts = cut_media(escaped)

    assert len(escaped) > len(plain)
    assert [bytes(text) for text in cuts.values()] == [SLASHED, SLASHED]
    assert loaded(b"".join(pieces(orjson.dumps(loaded(rest)), cuts))) == body
    assert cut_and_parsed(escaped, parse_object, 400)[2] < 200  # escapes in media are no text


@given(
    st.lists(st.sampled_from([*(escape for _, escape in ESCAPES), b"\\", b"u", b"002B"])).map(
        b"".join
    )
    | st.sampled_from([rb"\n", rb"\u000a", rb"\u0022", rb"\\", rb"\\/", rb"\u005c", rb"\u00e9"]),
    st.integers(0, len(BASE64)),
)
def test_any_escape_in_media_leaves_the_value_of_the_body(escape: bytes, at: int) -> None:
    raw = b'{"data":"%b%b%b", "x": 1}' % (BASE64[:at], escape, BASE64[at:])
    rest, cuts = cut_media(raw)
    value = loaded(rest)

    assert (value is None) == (loaded(raw) is None)
    if value is not None:
        assert loaded(b"".join(pieces(orjson.dumps(value), cuts))) == loaded(raw)


@pytest.mark.parametrize("colon", [b":", b": ", b" : ", b"\n\t:\r\n "])
def test_base64_under_data_is_cut_however_its_colon_is_spaced(colon: bytes) -> None:
    raw = b'{"input_audio": {"data"%b"%b"}}' % (colon, BASE64)
    [text] = cut_media(raw)[1].values()

    assert text == BASE64


def test_words_stay() -> None:
    raw = orjson.dumps({"content": "word " * WINDOW, "numbers": [1] * WINDOW})

    assert cut_media(raw) == (raw, NO_CUTS)


@pytest.mark.security("S11")
def test_a_mark_is_another_each_time_and_no_clients() -> None:
    """With a known mark, a client could substitute the media of another client for its own."""
    raw = orjson.dumps({"url": url(BASE64)})
    [mark], [other] = cut_media(raw)[1], cut_media(raw)[1]

    assert mark != other
    assert len(mark) == len(other) == PLACEHOLDER_LENGTH
    claimed = MMItem((), "image_url", {"image_url": {"url": url(mark.encode())}})
    assert source(claimed, cuts=cut_media(raw)[1]) == Inline("image/png", mark.encode())


def test_a_cut_picture_can_be_inspected() -> None:
    item = MMItem((), "image_url", {"image_url": {"url": 7}})
    with pytest.raises(BadRequest):
        source(item, cuts=cut_media(orjson.dumps({"url": url(BASE64)}))[1])


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
    try:
        body.parse_json(orjson.dumps(value), max_containers=2, max_values=6)
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
