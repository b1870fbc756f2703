from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.api.body import reply_field
from epd.api.chat import CHAT
from epd.api.items import Body
from epd.errors import UnknownMedia, UpstreamFailed
from epd.routing.instances import Instance, Role
from epd.transfer import Params
from epd.transfer.encoded import (
    EncodedItem,
    OutputFacts,
    consumer_body,
    read_encoded,
)
from epd.transfer.kv import Handover
from epd.transfer.nixl import Nixl
from epd.transfer.registry import EC_TRANSFERS
from tests.requests import Part, image, input_audio, request, text, video

GRID = {"image_grid_thw": [1, 36, 54]}
HASH = "ab" * 32

small_json = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def encoded(uuid: str) -> OutputFacts:
    return OutputFacts({uuid: {"item_indices": [0], "metadata": GRID}}, uuid, GRID)


def read(params: object) -> OutputFacts:
    return read_encoded(orjson.dumps({"ec_transfer_params": params}), "image")


def test_an_encode_reply() -> None:
    params = {"k": {"modality": "image", "item_indices": [0], "metadata": GRID, "peer_port": 1}}

    assert read(params) == OutputFacts(params, "k", GRID)


@pytest.mark.parametrize("params", [None, {}])
def test_an_encode_reply_that_reports_nothing(params: object) -> None:
    assert read(params) == read_encoded(b"{}", "image") == OutputFacts()


def test_a_video_with_sound_is_two_features_and_sent_raw() -> None:
    params = {
        "a": {"modality": "video", "item_indices": [0], "metadata": {"video_grid_thw": [1, 2, 2]}},
        "b": {"modality": "audio", "item_indices": [1], "metadata": {"audio_num_tokens": [5]}},
    }

    assert read(params) == OutputFacts(params)


@pytest.mark.fault(12)
@pytest.mark.parametrize(
    "params",
    [
        {"k": 1},
        {"k": {"item_indices": [1]}},
        {"k": {"item_indices": [0, 0]}},
        {"k": {"item_indices": [False]}},
        {"k": {"modality": "audio", "metadata": {"audio_num_tokens": [5]}}},
        {"k": {"metadata": [1]}},
        {"k": {"metadata": {"image_grid_thw": 1}}},
        {"k": {"metadata": {"image_grid_thw": ["1"]}}},
        {"k": {"metadata": {"image_grid_thw": [[[1]]]}}},
        {"a": {}, "b": {}},
        {"a": {"modality": "image"}, "b": {"modality": "image"}},
        [],
        "x",
    ],
)
def test_a_report_that_does_not_fit_one_item_is_refused(params: object) -> None:
    with pytest.raises(UpstreamFailed):
        read(params)


@given(
    st.binary()
    | st.builds(
        lambda value: orjson.dumps(value, default=str),
        st.dictionaries(st.sampled_from(["ec_transfer_params", "kv_transfer_params"]), small_json),
    )
)
def test_any_reply_is_read_or_refused(reply: bytes) -> None:
    for reader in (
        lambda raw: read_encoded(raw, "image"),
        replied,
    ):
        try:
            reader(reply)
        except UpstreamFailed as error:
            assert error.status == 502


def consumed(body: Body, *replies: tuple[str | None, OutputFacts], raw: bool = False) -> Body:
    items = [
        EncodedItem(replace(item, content_key=key), reply, "encoded")
        for item, (key, reply) in zip(CHAT.items(body), replies, strict=True)
    ]
    params = EC_TRANSFERS["store"].consumer_params(one.facts for one in items)
    return consumer_body(body, items, params, raw=raw).body


def test_text_is_passed_unchanged() -> None:
    body = request(text())

    assert consumed(body) is body


def test_the_clients_uuid_never_goes_through() -> None:
    body = request(image(uuid="theirs"), image("http://a/b", uuid="theirs"))

    for raw in (True, False):
        new = consumed(body, ("ours", encoded("ours")), (None, encoded("?")), raw=raw)
        assert "theirs" not in str(new)


def test_audio_and_pictures_that_are_both_known_are_both_metadata() -> None:
    sound = OutputFacts({"s": {}}, "s", {"audio_num_tokens": [5]})
    new = consumed(request(image(), input_audio()), ("p", encoded("p")), ("s", sound))

    assert [part["type"] for part in new["messages"][0]["content"]] == [
        "image_embeds",
        "audio_embeds",
    ]
    assert set(new["ec_transfer_params"]) == {"p", "s"}


def test_a_reported_hash_serves_as_uuid_of_remote_media() -> None:
    new = consumed(request(image("http://a/b")), (None, encoded(HASH)))

    assert new["messages"][0]["content"][0]["uuid"] == HASH


@pytest.mark.parametrize("identifier", ["lora:" + HASH, "../x", "", HASH[:-1], "x" * 64])
def test_an_identifier_other_than_a_bare_hash_is_not_used(identifier: str) -> None:
    new = consumed(request(image("http://a/b")), (None, encoded(identifier)))

    assert new["messages"][0]["content"] == [image("http://a/b")]


@pytest.mark.parametrize("kwargs", ["mm_processor_kwargs", "media_io_kwargs"])
def test_nor_does_one_that_the_consumer_would_hash_again(kwargs: str) -> None:
    body = request(image("http://a/b"), **{kwargs: {"x": 1}})
    new = consumed(body, (None, encoded(HASH)))

    assert new["messages"][0]["content"] == [image("http://a/b")]


def test_metadata_and_raw_media_are_never_mixed() -> None:
    body = request(image(b"1"), image(b"2"))
    new = consumed(body, ("a", encoded("a")), ("b", OutputFacts({"b": {}}, "b")))

    assert new["messages"][0]["content"] == [image(b"1", uuid="a"), image(b"2", uuid="b")]
    assert set(new["ec_transfer_params"]) == {"a", "b"}


def film() -> OutputFacts:
    return OutputFacts({"v": {}}, "v", {"video_grid_thw": [2, 16, 16]})


def kinds(body: Body) -> list[str]:
    return [part["type"] for part in body["messages"][0]["content"]]


def test_video_is_sent_raw_with_its_uuid() -> None:
    """Its metadata lack the frame rate: measured answers differed from those to the raw video."""
    new = consumed(request(video()), ("v", film()))

    assert new["messages"][0]["content"] == [{**video(), "uuid": "v"}]


def test_a_video_with_reported_timestamps_is_sent_as_metadata() -> None:
    """For Qwen3-VL, measured answers equal those to the raw video at every frame rate."""
    times = {"video_grid_thw": [[2, 4, 6]], "timestamps": [0.25, 1.25]}
    new = consumed(
        request(image(), video()), ("p", encoded("p")), ("v", OutputFacts({"v": {}}, "v", times))
    )

    assert kinds(new) == ["image_embeds", "video_embeds"]
    assert new["messages"][0]["content"][1] == {
        "type": "video_embeds",
        "video_embeds": {"video_grid_thw": [2, 4, 6], "timestamps": [0.25, 1.25]},
        "uuid": "v",
    }


def test_equal_times_do_not_replace_a_key() -> None:
    times = OutputFacts({"v": {}}, "x", {"timestamps": [0.25]})
    new = consumed(request(video()), (None, times))

    assert new["messages"][0]["content"] == [video()]


@pytest.mark.fault(75)
def test_metadata_and_raw_media_of_two_modalities_are_never_mixed() -> None:
    """Processors that build dummy text for all items answer 400 if they get only the raw ones."""
    new = consumed(request(image(), video()), ("p", encoded("p")), ("v", film()))

    assert new["messages"][0]["content"] == [{**image(), "uuid": "p"}, {**video(), "uuid": "v"}]


def test_items_beside_audio_are_sent_raw_if_one_must_be() -> None:
    sound = OutputFacts({"s": {}}, "s", {"audio_num_tokens": [5]})
    body = request(image(), video(), input_audio())
    new = consumed(body, ("p", encoded("p")), ("v", film()), ("s", sound))

    assert kinds(new) == ["image_url", "video_url", "input_audio"]


ANY_ITEMS = st.lists(
    st.tuples(
        st.sampled_from([image(), input_audio(), video(), image("http://a/b")]),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)
"""Parts, whether each came without its media, and whether its metadata was reported."""


@given(items=ANY_ITEMS, raw=st.booleans())
def test_items_of_a_request_are_sent_all_as_metadata_or_all_raw(
    items: list[tuple[Part, bool, bool]], raw: bool
) -> None:
    parts = [
        {**part, part["type"]: None, "uuid": f"k{index}"} if named else part
        for index, (part, named, _) in enumerate(items)
    ]
    replies = (
        (f"k{index}", encoded(f"k{index}") if reported else OutputFacts())
        for index, (_, _, reported) in enumerate(items)
    )
    possible = all(reported and part["type"] != "video_url" for part, _, reported in items)
    named = [named for _, named, _ in items]
    try:
        sent = kinds(consumed(request(*parts), *replies, raw=raw))
    except UnknownMedia as error:
        assert any(named)
        assert not possible
        assert "needs the media themselves" in error.message
        return

    embeds = [kind.endswith("_embeds") for kind in sent]
    if any(named) and not possible:  # only a mixture is left
        assert all(embed for embed, name in zip(embeds, named, strict=True) if name)
    else:
        assert embeds == [possible and (any(named) or not raw)] * len(items)


HANDOVER = Handover("id", Instance(Role.PREFILL, "http://p"))


def replied(reply: bytes) -> Params | None:
    return Nixl().decode_params(HANDOVER, reply_field(reply, "kv_transfer_params", stage="prefill"))


def test_a_prefill_reply() -> None:
    assert replied(b'{"kv_transfer_params": {"remote_port": 1}}') == {"remote_port": 1}


@pytest.mark.parametrize("reply", [b"{}", b'{"kv_transfer_params": null}', b"[]", b"x"])
def test_a_prefill_reply_without_params_is_refused(reply: bytes) -> None:
    with pytest.raises(UpstreamFailed):
        replied(reply)
