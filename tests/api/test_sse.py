import re
from itertools import accumulate, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from epd.api.sse import ANTHROPIC, OPENAI, RESPONSES, EventAligner, Grammar

EVENTS = [
    "data: é漢\n\n".encode(),
    b"data: 1\r\n\r\n",
    b"data: 1\r\r",
    b": comment\n\n",
    b"event: x\ndata: 1\ndata: 2\n\n",
    b"data: \r\ndata: a\n\r\n",
]
DONE = b"data: [DONE]\n\n"


def cut(data: bytes, points: list[int]) -> list[bytes]:
    edges = [0, *sorted(point % (len(data) + 1) for point in points), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@pytest.mark.fault(41)
@given(st.lists(st.sampled_from(EVENTS), max_size=6), st.lists(st.integers(min_value=0)))
def test_a_stream_cut_anywhere_comes_out_whole_in_whole_events(
    events: list[bytes], points: list[int]
) -> None:
    stream = b"".join([*events, DONE])
    ends = {len(b"".join(events[:n])) for n in range(len(events) + 1)} | {len(stream)}
    aligner = EventAligner()
    out = b""
    for chunk in cut(stream, points):
        out += aligner.feed(chunk)
        # A CRLF event may be forwarded at its CR CR LF: the blank line is complete then.
        assert any(abs(len(out) - end) <= 1 for end in ends)

    assert out == stream
    assert aligner.ended


PLAIN = [
    b'data: {"id":"1","choices":[]}\n\n',
    b'data: {"errors":[]}\n\n',
    b'data: {"error":{"message":"m"}}\n\n',
    b'data: {"error" :1}\n\n',
    b'data: { "error": 1}\n\n',
    b'data: {"a":1,\rdata: [DONE]\r"b":2}\n\n',
    b'data: {"a":1,\nevent: error\n"b":2}\n\n',
    b'data: {"a":1,\ndata: {"b":2}\n\n',
    b'data: {"a":1}\n\r\n',
    b'event: x\ndata: {"a":1}\n\n',
    b'event: message_stop\ndata: {"a":1}\n\n',
    b'event: response.completed\ndata: {"response":{}}\n\n',
]
"""Events that fill a chunk alone, and some that only look so."""


@pytest.mark.parametrize("grammar", [OPENAI, RESPONSES, ANTHROPIC])
@given(
    events=st.lists(st.sampled_from([*PLAIN, *EVENTS, DONE]), min_size=1, max_size=6),
    whole=st.lists(st.booleans(), min_size=6, max_size=6),
    inside=st.lists(st.integers(min_value=0), max_size=3),
    at_starts=st.booleans(),
)
@example(events=[PLAIN[7]], whole=[], inside=[15], at_starts=False)
def test_one_event_in_a_chunk_is_judged_as_if_it_came_byte_by_byte(
    grammar: Grammar,
    events: list[bytes],
    whole: list[bool],
    inside: list[int],
    *,
    at_starts: bool,
) -> None:
    stream = b"".join(events)
    ends = accumulate(map(len, events))
    points = [end for end, kept in zip(ends, whole, strict=False) if kept] + inside
    if at_starts:
        points += [found.start() for found in re.finditer(b"data: ", stream)]
    in_chunks, in_bytes = EventAligner(grammar), EventAligner(grammar)
    for chunk in cut(stream, points):
        out = in_chunks.feed(chunk)
        expected = b"".join([in_bytes.feed(bytes([byte])) for byte in chunk])

        # One may forward a CRLF event at its CR LF CR, and the other with the LF after it.
        assert abs(len(out) - len(expected)) <= 1
        assert (in_chunks.done, in_chunks.failed) == (in_bytes.done, in_bytes.failed)
        assert in_chunks.ended is in_bytes.ended


@pytest.mark.parametrize(
    ("stream", "ended"),
    [
        (DONE, True),
        (b"data:[DONE]\r\n\r\n", True),
        (b"data: x\n\n" + DONE, True),
        (DONE + b": comment\n\n", True),
        (b'data: {"error": {"message": "m"}}\n\n', True),
        (b'data: {"choices": [{"delta": "data: [DONE]"}]}\n\n', False),
        (b"data: say [DONE]\n\n", False),
        (b"xdata: [DONE]\n\n", False),
        (b"data: [DONE]\n", False),
        (b"", False),
    ],
)
def test_a_stream_has_ended_after_its_last_event(stream: bytes, ended: bool) -> None:
    aligner = EventAligner()
    aligner.feed(stream)

    assert aligner.ended is ended


def test_an_event_without_end_is_refused() -> None:
    aligner = EventAligner(max_event_bytes=10)
    aligner.feed(b"data: 1234")
    with pytest.raises(ValueError, match="too large"):
        aligner.feed(b"5")


def test_a_large_event_in_small_pieces_takes_linear_time() -> None:
    """Each byte is searched once; searching it again with each piece would take minutes."""
    aligner = EventAligner()
    for _ in range(8 * 1024):
        assert aligner.feed(b"x" * 1024) == b""
    assert len(aligner.feed(b"\n\n")) == 8 * 1024 * 1024 + 2


DELTA = b'event: response.output_text.delta\ndata: {"delta":"event: error response.completed"}\n\n'
TEXT = b'event: content_block_delta\ndata: {"delta":{"text":"message_stop \\nevent: error"}}\n\n'
CREATED = b'event: response.created\ndata: {"response":{"status":"in_progress"}}\n\n'


@pytest.mark.parametrize(
    ("grammar", "before", "last"),
    [
        (RESPONSES, CREATED + DELTA, b'event: response.completed\ndata: {"response":{}}\n\n'),
        (RESPONSES, DELTA, b'event: response.incomplete\ndata: {"response":{}}\n\n'),
        (RESPONSES, DELTA, b'event:response.failed\r\ndata: {"response":{}}\r\n\r\n'),
        (ANTHROPIC, TEXT, b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
    ],
)
@given(data=st.data())
def test_named_events_end_a_stream_wherever_it_is_cut(
    grammar: Grammar, before: bytes, last: bytes, data: st.DataObject
) -> None:
    aligner = EventAligner(grammar)
    at = data.draw(st.integers(0, len(before)))
    for chunk in (before[:at], before[at:]):
        aligner.feed(chunk)
        assert not aligner.ended
    at = data.draw(st.integers(0, len(last)))
    aligner.feed(last[:at])
    aligner.feed(last[at:])

    assert aligner.done


@pytest.mark.parametrize("grammar", [RESPONSES, ANTHROPIC])
@pytest.mark.parametrize("error", [b"event: error\ndata: {}\n\n", b'data: {"error": {}}\n\n'])
def test_an_error_ends_a_stream_of_named_events(grammar: Grammar, error: bytes) -> None:
    aligner = EventAligner(grammar)
    aligner.feed(DELTA + TEXT)
    assert not aligner.ended
    aligner.feed(error)

    assert aligner.ended
    assert not aligner.done


INSIDE = b'{"error": {"message": "Internal server error", "code": 500}}'
FAILED_STREAMS = [
    (OPENAI, b'data: {"role": 1}\n\n' + b"data: " + INSIDE + b"\n\n"),
    (RESPONSES, b"event: response.created\ndata: {}\n\nevent: error\ndata: " + INSIDE + b"\n\n"),
    (ANTHROPIC, b"event: message_start\ndata: {}\n\nevent: error\ndata: " + INSIDE + b"\n\n"),
]


@pytest.mark.parametrize(("grammar", "stream"), FAILED_STREAMS)
def test_a_failure_before_the_first_token_is_found_once_it_is_whole(
    grammar: Grammar, stream: bytes
) -> None:
    for end in range(len(stream) - 1):
        assert not grammar.has_begun(stream[:end])
        assert grammar.failure_inside(stream[:end]) in {None, INSIDE}

    assert grammar.has_begun(stream)
    assert grammar.failure_inside(stream) == INSIDE


@pytest.mark.parametrize(("grammar", "stream"), FAILED_STREAMS)
def test_a_failure_after_the_first_token_is_relayed(grammar: Grammar, stream: bytes) -> None:
    token = b'event: response.output_text.delta\ndata: {"a": 1}\n\n' * 2

    assert grammar.failure_inside(token + stream) is None


@given(st.binary())
def test_any_error_of_a_stream_is_found_as_it_is_sent_or_not_at_all(events: bytes) -> None:
    begun = b"event: error\ndata:" + events
    for grammar in (OPENAI, RESPONSES, ANTHROPIC):
        error = grammar.failure_inside(begun)
        assert error is None or (grammar.has_begun(begun) and error in begun)
