"""Contents of `ec_transfer_params` for each transfer."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.api.chat import CHAT, encode_body
from epd.api.items import feature_count
from epd.errors import NoInstance, UpstreamFailed
from epd.routing.instances import Instance, Role
from epd.routing.table import InstanceTable, Reservation
from epd.transfer.ec import ECTransfer
from epd.transfer.encoded import OutputFacts, read_encoded
from epd.transfer.registry import EC_TRANSFERS
from tests.requests import image, request, video

MEMORY: dict[str, Any] = {"peer_host": "e", "peer_port": 5601, "size_bytes": 512, "shape": [1, 256]}
GRID = {"image_grid_thw": [1, 36, 54]}
NIXL, MOONCAKE = EC_TRANSFERS["nixl"], EC_TRANSFERS["mooncake"]


def said(*entries: tuple[str, dict[str, Any]]) -> OutputFacts:
    reply = orjson.dumps({"ec_transfer_params": dict(entries)})
    return read_encoded(reply, "video" if len(entries) > 1 else "image")


def place(*addresses: str) -> Reservation:
    consumer = Instance(Role.PREFILL_DECODE, "http://pd:1", len(addresses), 1.0, "", addresses)
    return InstanceTable([consumer]).reserve_place(consumer)


def entry(index: int = 0, **more: Any) -> dict[str, Any]:
    return {"item_indices": [index], "metadata": GRID, **more}


@pytest.mark.parametrize("transfer", [EC_TRANSFERS["store"], EC_TRANSFERS["example"], NIXL])
def test_most_connectors_carry_the_encode_reply(transfer: ECTransfer) -> None:
    one, other = said(("a", entry(**MEMORY))), said(("b", entry(**MEMORY)))

    assert transfer.encode_params(None, 1) is None
    assert [transfer.output_facts(known, None) for known in (one, other)] == [one, other]
    assert transfer.consumer_params([one, other]) == {**one.params, **other.params}
    assert transfer.consumer_params([]) == {}


@pytest.mark.parametrize("missing", MEMORY)
def test_an_output_without_its_whole_address_needs_its_media(missing: str) -> None:
    known = {name: value for name, value in MEMORY.items() if name != missing}
    replied = said(("a", entry(**known)))

    assert NIXL.missing_field(replied) == missing
    assert NIXL.output_facts(replied, None) == OutputFacts(replied.params, "a", {})


def test_pushes_go_to_the_address_of_the_rank() -> None:
    consumer = place("tcp://pd:1", "tcp://pd:2")
    consumer.rank = 1

    params = MOONCAKE.encode_params(consumer, 2)
    assert params is not None

    assert params["consumer_zmq"] == "tcp://pd:2"
    assert [set(item) for item in params["ec_items"]] == [{"transfer_id"}] * 2
    assert len({item["transfer_id"] for item in params["ec_items"]}) == 2


@pytest.mark.parametrize("consumer", [None, place()])
def test_mooncake_refuses_a_consumer_without_an_address(consumer: Reservation | None) -> None:
    with pytest.raises(NoInstance, match="--ec-consumer-zmq-addrs"):
        MOONCAKE.encode_params(consumer, 1)


def test_ids_are_of_places_and_not_of_reports() -> None:
    mooncake, asked = MOONCAKE, {"ec_items": [{"transfer_id": "0"}, {"transfer_id": "1"}]}
    replied = said(
        ("sound", entry(0, modality="audio", transfer_id="x")),
        ("film", entry(1, modality="video", transfer_id="y")),
    )

    assert mooncake.consumer_params([mooncake.output_facts(replied, asked)]) == {
        "ec_items": [
            {"mm_hash": "film", "transfer_id": "1"},
            {"mm_hash": "sound", "transfer_id": "0"},
        ]
    }


@pytest.mark.parametrize(
    ("reported", "items"), [("x", [{"mm_hash": "b", "transfer_id": "x"}]), (None, []), (1, [])]
)
def test_an_unrequested_output_has_the_reported_transfer_id(
    reported: object, items: list[dict[str, str]]
) -> None:
    mooncake, asked = MOONCAKE, {"ec_items": [{"transfer_id": "0"}]}
    replied = said(("a", entry(modality="video")), ("b", entry(1, transfer_id=reported)))

    told = mooncake.consumer_params([mooncake.output_facts(replied, asked)])

    assert told == {"ec_items": [{"mm_hash": "a", "transfer_id": "0"}, *items]}


def test_two_outputs_of_one_push_are_refused() -> None:
    asked = {"ec_items": [{"transfer_id": "0"}, {"transfer_id": "1"}]}
    replied = said(("a", entry(modality="video")), ("b", entry(modality="audio")))

    with pytest.raises(UpstreamFailed, match="two features have the same index"):
        MOONCAKE.output_facts(replied, asked)


def test_an_encode_reply_without_parameters_is_rejected() -> None:
    with pytest.raises(UpstreamFailed, match="ECMooncakeConnector"):
        MOONCAKE.output_facts(OutputFacts(), {"ec_items": []})


values = st.none() | st.booleans() | st.integers(-2, 3) | st.text(max_size=3)
entries = st.fixed_dictionaries(
    {},
    optional={
        "item_indices": st.lists(values, max_size=3) | values,
        "modality": values,
        "transfer_id": values,
        "metadata": st.just(GRID) | st.none(),
        **dict.fromkeys(MEMORY, values),
    },
)


@given(st.dictionaries(st.text(max_size=3), entries, max_size=3))
def test_any_reply_is_carried_or_refused(params: dict[str, Any]) -> None:
    asked = {"ec_items": [{"transfer_id": "0"}, {"transfer_id": "1"}]}
    for transfer in EC_TRANSFERS.values():
        try:
            replied = read_encoded(orjson.dumps({"ec_transfer_params": params}), "image")
            told = transfer.consumer_params([transfer.output_facts(replied, asked)])
        except UpstreamFailed as error:
            assert error.slug == "encode_metadata"
            continue
        if transfer.pushed:
            ids = [item["transfer_id"] for item in told.get("ec_items", ())]
            assert len(ids) == len(set(ids))
            assert all(isinstance(one, str) for one in ids)
        else:
            assert told == params


@pytest.mark.parametrize(
    ("part", "kwargs", "expected"),
    [
        (video(), {}, 1),
        (video(), {"mm_processor_kwargs": {"use_audio_in_video": True}}, 2),
        (video(), {"mm_processor_kwargs": {"use_audio_in_video": False}}, 1),
        (video(), {"mm_processor_kwargs": "use_audio_in_video"}, 1),
        (image(), {"mm_processor_kwargs": {"use_audio_in_video": True}}, 1),
    ],
)
def test_a_videos_sound_is_a_separate_output(
    part: dict[str, Any], kwargs: dict[str, Any], expected: int
) -> None:
    body = request(part, **kwargs)
    [item] = CHAT.items(body)

    assert feature_count(body, item) == expected
    assert "ec_transfer_params" not in encode_body(body, item)
    assert encode_body(body, item, {"a": 1})["ec_transfer_params"] == {"a": 1}
