"""Encoder-cache transfers, with vLLM's own connectors reading and writing the parameters."""

import importlib
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import pytest
import torch

from epd.routing.instances import Instance, Role
from epd.routing.table import InstanceTable
from epd.transfer.ec import ECTransfer
from epd.transfer.encoded import OutputFacts, read_encoded
from epd.transfer.registry import EC_TRANSFERS

ADDRESS = "tcp://127.0.0.1:19019"


@pytest.fixture
def transfers(vllm: Any) -> Any:
    """Return the module `tests.ec_store.vllm_connector.transfers`."""
    del vllm  # requested first: it skips without vLLM
    return importlib.import_module("tests.ec_store.vllm_connector.transfers")


def encoded(
    transfer: ECTransfer, reply: Mapping[str, Any], asked: Mapping[str, Any] | None
) -> OutputFacts:
    """Return the facts about an item from an encode instance's reply."""
    written = orjson.dumps({"ec_transfer_params": reply})
    return transfer.output_facts(read_encoded(written, "image"), asked)


@pytest.mark.parametrize("keys", ["a", "ab", "aba", "aab", "abba"])
def test_mooncake_consumer_waits_for_pushed_outputs(vllm: Any, transfers: Any, keys: str) -> None:
    consumer = Instance(Role.PREFILL_DECODE, "http://pd:1", ec_zmq_addrs=(ADDRESS,))
    place = InstanceTable([consumer]).reserve_place(consumer)
    mooncake, producer = EC_TRANSFERS["mooncake"], transfers.MooncakeProducer()
    items, pushes = list[OutputFacts](), list[tuple[str, str, str]]()
    for key in keys:  # one request each
        asked = mooncake.encode_params(place, 1)
        request = transfers.asked(vllm, [key], asked)
        pushes += producer.pushes(request)
        _, reply = producer.request_finished(request)
        items.append(encoded(mooncake, reply, asked))

    params = orjson.loads(orjson.dumps(mooncake.consumer_params(items)))

    assert [(address, key) for address, _, key in pushes] == [(ADDRESS, key) for key in keys]
    waited = transfers.transfer_ids(transfers.asked(vllm, list(keys), params))
    assert waited == [transfer for _, transfer, _ in pushes]


def test_mooncakes_producer_pushes_both_features_of_a_video(vllm: Any, transfers: Any) -> None:
    consumer = Instance(Role.PREFILL_DECODE, "http://pd:1", ec_zmq_addrs=(ADDRESS,))
    mooncake, producer = EC_TRANSFERS["mooncake"], transfers.MooncakeProducer()
    asked = mooncake.encode_params(InstanceTable([consumer]).reserve_place(consumer), 2)
    request = transfers.asked(vllm, ["sound", "film"], asked)
    request.mm_features[0].modality, request.mm_features[1].modality = "audio", "video"
    pushes = producer.pushes(request)
    _, reply = producer.request_finished(request)
    for key, feature in zip(reply, request.mm_features, strict=True):
        reply[key]["modality"] = feature.modality  # 0.33 reports it

    params = mooncake.consumer_params([encoded(mooncake, reply, asked)])

    for order in (["sound", "film"], ["film", "sound"]):
        by_key = {key: transfer for _, transfer, key in pushes}
        waited = transfers.transfer_ids(transfers.asked(vllm, order, params))
        assert waited == [by_key[key] for key in order]


@pytest.fixture
def side_channel(monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the free port on which a producer will listen."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    monkeypatch.setenv("VLLM_EC_SIDE_CHANNEL_HOST", "127.0.0.1")
    monkeypatch.setenv("VLLM_EC_SIDE_CHANNEL_PORT", str(port))
    return port


def steps(consumers: Sequence[Any], producer: Any, request: Any) -> None:
    """Let the engines step until all consumers have the items of the request."""
    deadline_s = time.monotonic() + 60
    waiting = list(consumers)
    while waiting and time.monotonic() < deadline_s:
        waiting = [one for one in waiting if not one.ensure_cache_available(request, 0)]
        for one in (*consumers, producer):
            one.build_connector_meta(None)
        time.sleep(0.01)
    assert waiting == []


def test_any_number_of_consumers_reads_from_the_encode_instances_memory(
    vllm: Any, transfers: Any, side_channel: int
) -> None:
    nixl = EC_TRANSFERS["nixl"]
    with (
        transfers.memory(vllm, "ec_producer") as producer,
        transfers.memory(vllm, "ec_consumer") as one,
        transfers.memory(vllm, "ec_consumer") as other,
    ):
        made = transfers.asked(vllm, ["key"], None)
        output = torch.rand(4, 256)
        transfers.write(producer, made, output)
        _, reply = producer.request_finished(made)
        assert nixl.missing_field(encoded(nixl, reply, None)) is None
        assert reply["key"]["peer_port"] == side_channel

        params = orjson.loads(orjson.dumps(nixl.consumer_params([encoded(nixl, reply, None)])))
        steps([one, other], producer, transfers.asked(vllm, ["key"], params))

        assert torch.equal(transfers.read(one, "key"), output)
        assert torch.equal(transfers.read(other, "key"), output)
        one.take_unavailable_requests()


def test_an_output_outside_memory_has_no_address_and_no_metadata(
    vllm: Any, transfers: Any, side_channel: int
) -> None:
    del side_channel
    with transfers.memory(vllm, "ec_producer") as producer:
        _, reply = producer.request_finished(transfers.asked(vllm, ["key"], None))

        assert encoded(EC_TRANSFERS["nixl"], reply, None).metadata == {}
        assert (
            EC_TRANSFERS["nixl"].missing_field(encoded(EC_TRANSFERS["nixl"], reply, None))
            == "peer_host"
        )
