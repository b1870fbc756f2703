"""KV transfers: parameters for each instance, and which instances each accepts."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.errors import UpstreamFailed
from epd.routing.instances import Instance, Role
from epd.transfer.kv import Handover, KVTransfer, LMCache
from epd.transfer.mooncake import Mooncake
from epd.transfer.moriio import MoRIIO
from epd.transfer.nixl import KEEP, Multi, Nixl, NixlPush
from epd.transfer.registry import KV_TRANSFERS

KINDS: dict[type[KVTransfer], None] = dict.fromkeys([*KV_TRANSFERS.values(), MoRIIO])
EVERY = [kind() for kind in KINDS]
NAMES = [one.name for one in EVERY]

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=9),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=20,
)


def prefill(kv_addr: str = "", url: str = "http://p:8000") -> Instance:
    return Instance(Role.PREFILL, url, kv_addr=kv_addr)


def decode(kv_addr: str = "") -> Instance:
    return Instance(Role.DECODE, "http://d:8000", kv_addr=kv_addr)


def test_a_conversations_next_turn_names_the_blocks_of_the_last() -> None:
    last = {"remote_engine_id": "d", "do_remote_prefill": True, "do_remote_decode": False}
    told = Nixl().prefill_params(Handover("r", prefill(), earlier=last))

    assert told == last | {"do_remote_decode": True, "do_remote_prefill": False}


def test_a_multi_connector_carries_the_parameters_of_its_parts() -> None:
    handover = Handover("r", prefill())

    assert Multi().decode_params(handover, {"remote_port": 1}) == {"remote_port": 1}
    assert Multi().decode_params(handover, {}) is None


EVERYWHERE = ["0.0.0.0", "::", "0:0:0:0:0:0:0:0", ""]  # noqa: S104 - a server may report it


@pytest.mark.parametrize(
    "transfer", [Nixl(), NixlPush(), Multi(), MoRIIO()], ids=lambda one: one.name
)
@pytest.mark.parametrize(("host", "told"), [*((one, "p") for one in EVERYWHERE), ("h", "h")])
def test_decode_gets_a_reachable_host(transfer: KVTransfer, host: str, told: str) -> None:
    replied, handover = COORDINATES | {"remote_host": host}, Handover("r", prefill())

    assert transfer.decode_params(handover, replied) == replied | {"remote_host": told}
    if (peer := transfer.facts_of_reply(handover, replied)) is not None:
        said = transfer.decode_params(handover._replace(peer=peer), replied)
        assert said is not None
        assert said["remote_host"] == told


COORDINATES = {
    "remote_engine_id": "e",
    "remote_host": "h",
    "remote_port": 1,
    "tp_size": 2,
    "pp_size": 1,
    "dcp_size": 1,
}


def test_a_push_learns_coordinates_and_nothing_of_the_request() -> None:
    replied = COORDINATES | {"remote_block_ids": [[1]], "remote_request_id": "x", "more": 1}

    assert NixlPush().facts_of_reply(Handover("r", prefill()), replied) == COORDINATES


@pytest.mark.parametrize("missing", ["remote_engine_id", "remote_host", "remote_port", "tp_size"])
def test_a_push_learns_nothing_from_half_of_them(missing: str) -> None:
    assert (
        NixlPush().facts_of_reply(Handover("r", prefill()), COORDINATES | {missing: None}) is None
    )


def test_a_push_learns_nothing_from_a_rank_that_the_instance_chose() -> None:
    replied = COORDINATES | {"remote_engine_id": "e_dp1"}

    assert NixlPush().facts_of_reply(Handover("r", prefill()), replied) is None
    assert NixlPush().facts_of_reply(Handover("r", prefill(), 1), replied) == replied


def test_a_push_after_prefill_carries_its_reply() -> None:
    transfer, handover, replied = NixlPush(), Handover("r", prefill()), COORDINATES | {"more": 1}

    assert not transfer.decode_concurrent(None)
    assert transfer.prefill_params(handover) == KEEP
    assert transfer.decode_params(handover, replied) == replied
    with pytest.raises(UpstreamFailed):
        transfer.decode_params(handover, {})


@pytest.mark.parametrize(
    ("kv_addr", "url", "bootstrap"),
    [
        ("", "http://p:8000", "http://p:8998"),
        ("", "https://p/base", "http://p:8998"),
        ("", "http://[::1]:8000", "http://[::1]:8998"),
        ("10.0.0.1:9000", "http://p:8000", "http://10.0.0.1:9000"),
        ("https://p:1", "http://p:8000", "https://p:1"),
    ],
)
def test_a_bootstrap_server_has_the_configured_address(
    kv_addr: str, url: str, bootstrap: str
) -> None:
    handover = Handover("r", prefill(kv_addr, url), peer={"0": "e"})

    assert Mooncake().peer_url(handover.prefill) == f"{bootstrap}/query"
    assert Mooncake().decode_params(handover, {})["remote_bootstrap_addr"] == bootstrap


@pytest.mark.parametrize(
    ("rank", "engines", "engine_id"),
    [
        (None, {"0": "a"}, "a"),
        (None, {"3": "a"}, "a"),  # a rank behind an external load balancer
        (1, {"0": "a", "1": "b"}, "b"),
        (None, {"0": "a", "1": "b"}, None),
        (2, {"0": "a", "1": "b"}, None),
        (1, {"0": "a"}, None),
    ],
)
def test_the_engine_of_a_rank(
    rank: int | None, engines: dict[str, str], engine_id: str | None
) -> None:
    handover = Handover("r", prefill(), rank, peer=engines)
    if engine_id is None:
        with pytest.raises(UpstreamFailed):
            Mooncake().decode_params(handover, {})
    else:
        assert Mooncake().decode_params(handover, {})["remote_engine_id"] == engine_id


@given(json_values)
def test_any_answer_of_a_bootstrap_server_is_read_or_refused(said: Any) -> None:
    try:
        engines = Mooncake().parse_peer(said)
    except UpstreamFailed as error:
        assert error.stage == "prefill"
    else:
        assert all(isinstance(engine_id, str) and engine_id for engine_id in engines.values())


def test_prefill_gets_the_address_of_decodes_lmcache() -> None:
    handover = Handover("r", prefill(), decode=decode("10.0.0.1:7300+7301:7400+7401"))

    assert LMCache().prefill_params(handover) == {
        "disagg_spec": {
            "req_id": "r",
            "receiver_host": "10.0.0.1",
            "receiver_init_port": [7300, 7301],
            "receiver_alloc_port": [7400, 7401],
        }
    }


def test_prefill_gets_the_address_of_the_decode_that_it_writes_to() -> None:
    read = MoRIIO().prefill_params(Handover("r", prefill(), decode=decode()))
    written = MoRIIO().prefill_params(Handover("r", prefill(), decode=decode("[::1]:6301:61005")))

    assert read == {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "xfer-r"}
    assert written == {
        **read,
        "remote_host": "::1",
        "remote_handshake_port": 6301,
        "remote_notify_port": 61005,
        "remote_engine_id": None,
        "remote_block_ids": None,
    }


@pytest.mark.parametrize("transfer", EVERY, ids=NAMES)
@pytest.mark.parametrize("role", [Role.ENCODE, Role.PREFILL_DECODE])
def test_a_transfer_without_handover_has_no_address(transfer: KVTransfer, role: Role) -> None:
    transfer.check(Instance(role, "http://x"))
    with pytest.raises(ValueError, match="does not use"):
        transfer.check(Instance(role, "http://x", kv_addr="h:1"))


@pytest.mark.parametrize(
    ("transfer", "taken", "refused"),
    [
        (Nixl(), [""], ["h:1"]),
        (NixlPush(), [""], ["h:1"]),
        (Mooncake(), ["", "h:1", "http://h:1", "[::1]:1"], ["u:p@h:1", "h:1?x", "h x:1"]),
        (LMCache(), [""], ["h:1:2"]),
    ],
)
def test_the_addresses_that_prefill_instances_may_have(
    transfer: KVTransfer, taken: list[str], refused: list[str]
) -> None:
    assert [one for one in taken if not transfer.accepts_instance(prefill(one))] == []
    assert [one for one in refused if transfer.accepts_instance(prefill(one))] == []


@pytest.mark.parametrize(
    ("transfer", "taken", "refused"),
    [
        (Mooncake(), [""], ["h:1"]),
        (MoRIIO(), ["", "h:1:2", "[::1]:1:2"], ["h", "h:1", "h:1:2+3", "h:1+2:3", "h:0:1"]),
        (
            LMCache(),
            ["", "h:1:2", "h:1+2:3+4", "[::1]:1:2", "10.0.0.1:65535:1"],
            ["h", "h:1", "h:1:2:", "h:1:+", "::", "h:1:0", "h:1:x", ":1:2", "h:1:2\r\nX:1:2"],
        ),
    ],
)
def test_the_addresses_that_decode_instances_may_have(
    transfer: KVTransfer, taken: list[str], refused: list[str]
) -> None:
    assert [one for one in taken if not transfer.accepts_instance(decode(one))] == []
    assert [one for one in refused if transfer.accepts_instance(decode(one))] == []


@pytest.mark.parametrize(
    ("transfer", "instance_of", "address"),
    [(Mooncake(), prefill, "h.svc:1"), (LMCache(), decode, "h.svc:1:2")],
)
@given(at=st.integers(0, 10), more=st.text("\r\n\0 a1:", max_size=3))
def test_accepted_addresses_can_be_sent(
    transfer: KVTransfer, instance_of: Callable[[str], Instance], address: str, at: int, more: str
) -> None:
    assert transfer.accepts_instance(instance_of(address))
    address = address[:at] + more + address[at:]

    assert not (transfer.accepts_instance(instance_of(address)) and set(address) & set("\r\n\0"))
