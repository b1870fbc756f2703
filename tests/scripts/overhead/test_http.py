from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from scripts.overhead import load

CUTS = st.lists(st.integers(0, 4000), max_size=8)


def fed(data: bytes, cuts: list[int]) -> load.Message:
    message = load.Message()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in pairwise(edges):
        assert not message.complete or start == end == len(data)
        message.feed(data[start:end])
    return message


@given(st.binary(max_size=2000), CUTS)
def test_a_message_with_a_length_is_complete_when_all_of_it_has_come(
    body: bytes, cuts: list[int]
) -> None:
    message = fed(load.head("HTTP/1.1 200 OK", body) + body, cuts)

    assert message.complete
    assert message.status == 200
    assert message.content() == body


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=10), CUTS)
def test_a_chunked_one_is_complete_with_its_last_chunk(
    chunks: list[bytes], cuts: list[int]
) -> None:
    data = load.head("HTTP/1.1 503 Busy", None) + b"".join(map(load.chunk, chunks))
    message = fed(data, cuts)

    assert not message.complete
    message.feed(load.LAST_CHUNK)
    assert message.complete
    assert message.status == 503
    assert message.content() == b"".join(chunks)
