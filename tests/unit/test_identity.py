from hypothesis import given
from hypothesis import strategies as st

from epd.identity import content_key
from epd.media import Inline

media = st.builds(Inline, st.text(), st.text(alphabet=st.characters(codec="utf-8")))


@given(st.tuples(st.text(), media), st.tuples(st.text(), media))
def test_keys_are_equal_exactly_where_modality_type_and_content_are(
    one: tuple[str, Inline], other: tuple[str, Inline]
) -> None:
    assert (one == other) == (content_key(*one) == content_key(*other))


def test_a_key_is_what_vllm_and_any_store_accept() -> None:
    key = content_key("image", Inline("image/png", "YWJj"))

    assert len(key) == 64
    assert set(key) <= set("0123456789abcdef")


def test_keys_stay_what_they_were() -> None:
    """A key that changes makes every stored entry a miss: raise `VERSION` if it must."""
    key = content_key("image", Inline("image/png", "YWJj"))

    assert key == "57626d96a121a0e0a1f5e5328ed83e7dc6f1d251da7313611fc8f0736ca56f3d"
