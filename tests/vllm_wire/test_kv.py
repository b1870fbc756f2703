"""Parameters of KV transfers, given to the connectors of the installed vLLM."""

import importlib
import warnings
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from epd.routing.instances import Instance, Role
from epd.transfer.kv import Handover
from epd.transfer.mooncake import Mooncake
from epd.transfer.moriio import MoRIIO
from epd.transfer.nixl import NixlPush

pytestmark = pytest.mark.full

CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
PREFILL = Instance(Role.PREFILL, "http://p:8000")
HANDOVER = Handover("r:1:ab", PREFILL)


def loaded(name: str) -> Any:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: scripts/test.sh installs it")
    with warnings.catch_warnings(action="ignore"):
        return importlib.import_module(f"{CONNECTORS}.{name}")


def made(kind: Any, **attributes: Any) -> Any:
    """Return an object without calling its constructor, which would need an engine."""
    new = object.__new__(kind)
    for name, value in attributes.items():
        setattr(new, name, value)
    return new


def asked(params: Any, request_id: str = "chatcmpl-r:1:ab-0a1b2c3d") -> Any:
    return SimpleNamespace(
        request_id=request_id, kv_transfer_params=dict(params), prompt_token_ids=[1] * 16
    )


BLOCKS = SimpleNamespace(
    get_unhashed_block_ids_all_groups=lambda: ([1, 2],), get_block_ids=lambda: ([1, 2],)
)


def mooncake(*, producer: bool) -> Any:
    kind = loaded("mooncake.mooncake_connector").MooncakeConnectorScheduler
    return made(
        kind,
        is_kv_producer=producer,
        is_kv_consumer=not producer,
        _reqs_need_recv={},
        _reqs_need_send={},
        _reqs_not_processed=set(),
        get_sw_clipped_blocks=lambda blocks: blocks,
    )


def test_mooncake_bootstrap_servers_answer_is_read() -> None:
    server = loaded("mooncake.mooncake_utils").MooncakeBootstrapServer("127.0.0.1", 0)
    worker = {"tp_rank": 0, "pp_rank": 0, "addr": "tcp://10.0.0.1:1"}
    client = TestClient(server.app)
    for rank in (0, 1):
        own = worker | {"engine_id": f"engine-{rank}", "dp_rank": rank}
        assert client.post("/register", json=own).status_code == 200

    assert Mooncake().parse_peer(client.get("/query").json()) == {"0": "engine-0", "1": "engine-1"}


def test_mooncake_decode_pulls_the_blocks_of_prefill() -> None:
    transfer, handover = Mooncake(), HANDOVER._replace(peer={"0": "engine-0"})
    decode, prefill = mooncake(producer=False), mooncake(producer=True)
    decode.update_state_after_alloc(asked(transfer.decode_params(handover, {})), BLOCKS, 16)
    prefill.update_state_after_alloc(asked(transfer.prefill_params(handover)), BLOCKS, 0)
    [pulled] = decode.build_connector_meta(None).reqs_to_recv["engine-0"].values()
    [(sent, _)] = prefill.build_connector_meta(None).reqs_to_send.values()

    assert pulled.transfer_id == sent
    assert pulled.remote_bootstrap_addr == "http://p:8998"


def push(**attributes: Any) -> Any:
    parallel = SimpleNamespace(tensor_parallel_size=1)
    every = {
        "vllm_config": SimpleNamespace(parallel_config=parallel),
        "engine_id": "decode",
        "side_channel_host": "10.0.0.2",
        "side_channel_port": 5601,
        "use_host_buffer": False,
        "_reqs_in_batch": set[str](),
        "_reqs_need_recv": dict[str, Any](),
        "_push_registration_deadlines": dict[str, float](),
        "_push_registration_timeout": 1.0,
        "get_exchange_clipped_blocks": lambda blocks: blocks,
    }
    kind = loaded("nixl.push_scheduler").NixlPushConnectorScheduler
    return made(kind, **{**every, **attributes})


PEER = {"remote_engine_id": "e", "remote_host": "10.0.0.1", "remote_port": 5600, "tp_size": 2}


def test_a_push_is_registered_at_the_prefill_instance() -> None:
    transfer, handover = NixlPush(), HANDOVER._replace(peer=PEER)
    registrations: dict[str, Any] = {}
    decode = push(_push_pending_registrations=registrations)
    request = asked(transfer.decode_params(handover, {}))
    decode.update_state_after_alloc(request, BLOCKS, 16)
    [registered] = registrations.values()
    at = {name: registered[f"remote_{name}"] for name in ("engine_id", "host", "port", "tp_size")}
    metadata = loaded("nixl.metadata").NixlConnectorMetadata()
    metadata.add_new_req_to_recv(request.request_id, [[1]], request.kv_transfer_params)

    assert at == {"engine_id": "e", "host": "10.0.0.1", "port": 5600, "tp_size": 2}
    assert metadata.reqs_to_recv[request.request_id].remote.engine_id == "e"

    worker = made(
        loaded("nixl.push_worker").NixlPushConnectorWorker,
        _pending_d_registrations=registrations,
    )
    match = worker._pop_matching_registration  # noqa: SLF001 - prefill's worker calls it

    assert match("chatcmpl-r:2:cd-99887766") is None
    assert match("chatcmpl-r:1:ab-99887766") is registered


def test_a_push_prefill_keeps_its_blocks_and_sends_its_engine_id() -> None:
    prefill = push(
        _kv_lease_duration=30,
        _reqs_need_send={},
        _reqs_not_processed=set(),
        _finished_request_blocks={},
        _newly_finished_push_blocks={},
        _stop_heartbeat=lambda _: None,
        transfer_tp_size=1,
    )
    parallel = prefill.vllm_config.parallel_config
    parallel.decode_context_parallel_size = parallel.pipeline_parallel_size = 1
    status = importlib.import_module("vllm.v1.request").RequestStatus.FINISHED_LENGTH_CAPPED
    request = asked(NixlPush().prefill_params(HANDOVER))
    request.status, request.num_computed_tokens = status, 16
    kept, replied = prefill.request_finished(request, ([1, 2],))

    assert kept
    assert NixlPush().facts_of_reply(HANDOVER, replied) == {
        "remote_engine_id": "decode",
        "remote_host": "10.0.0.2",
        "remote_port": 5601,
        "tp_size": 1,
        "pp_size": 1,
        "dcp_size": 1,
    }


def moriio(*, producer: bool, read: bool) -> Any:
    modes = loaded("moriio.moriio_common").MoRIIOMode
    parallel = SimpleNamespace(
        tensor_parallel_size=2, data_parallel_size=1, data_parallel_size_local=1
    )
    return made(
        loaded("moriio.moriio_connector").MoRIIOConnectorScheduler,
        mode=modes.READ if read else modes.WRITE,
        is_producer=producer,
        vllm_config=SimpleNamespace(parallel_config=parallel),
        tp_size=2,
        engine_id="prefill",
        host_ip="10.0.0.1",
        handshake_port=6301,
        side_notify_port=61005,
        blocks_per_sw=[0],
        kv_cache_config=SimpleNamespace(kv_cache_groups=[None], select_transfer_block_ids=list),
        _has_mamba=False,
        _is_hma_required=False,
        _is_kv_master=True,
        _global_dp_rank=0,
        _max_decode_tail_blocks=1,
        _defer_timeout=60.0,
        transfer_id_to_request_id={},
        request_id_to_transfer_id={},
        _reqs_need_recv={},
        _reqs_need_save={},
        _reqs_need_send={},
        _req_kv_params={},
        _deferred_send_deadlines={},
    )


def finished(prefill: Any, params: Any) -> Any:
    """Return the reply of a prefill request with these parameters."""
    status = importlib.import_module("vllm.v1.request").RequestStatus.FINISHED_LENGTH_CAPPED
    request = asked(params)
    request.status = status
    prefill.update_state_after_alloc(request, BLOCKS, 0)
    kept, replied = prefill.request_finished(request, ([1, 2],))
    assert kept
    return replied


def metadata_of(request_id: str, params: Any, *, write: bool) -> Any:
    """Return what the worker gets of a request; without an address it would end the engine."""
    metadata = loaded("moriio.moriio_common").MoRIIOConnectorMetadata()
    metadata.add_new_req(request_id, [[1, 2]], params, write_mode=write)
    [request] = (metadata.reqs_to_save if write else metadata.reqs_to_recv).values()
    return request


def test_moriio_decode_reads_the_blocks_of_prefill() -> None:
    transfer, request_id = MoRIIO(), "chatcmpl-r:1:ab-0a1b2c3d"
    replied = finished(moriio(producer=True, read=True), transfer.prefill_params(HANDOVER))
    params = transfer.decode_params(HANDOVER, replied)
    assert params is not None
    decode, request = moriio(producer=False, read=True), asked(params)
    decode.update_state_after_alloc(request, BLOCKS, 15)
    [(_, blocks)] = decode._reqs_need_recv.values()  # noqa: SLF001 - what its worker gets
    read = metadata_of(request_id, params, write=False)

    assert blocks == [[1, 2]]
    assert (read.remote_host, read.remote_handshake_port) == ("10.0.0.1", 6301)
    assert (read.remote_engine_id, read.remote_block_ids) == ("prefill", [[1, 2]])
    assert (read.tp_size, read.transfer_id) == (2, "xfer-r:1:ab")


def test_moriio_prefill_writes_to_the_decode_that_it_is_told() -> None:
    target = Instance(Role.DECODE, "http://d:8000", kv_addr="10.0.0.2:6302:61007")
    transfer, handover = MoRIIO(), HANDOVER._replace(decode=target)
    params = transfer.prefill_params(handover)
    written = metadata_of("chatcmpl-r:1:ab-0a1b2c3d", params, write=True)

    assert (written.remote_host, written.remote_handshake_port) == ("10.0.0.2", 6302)
    assert (written.remote_notify_port, written.transfer_id) == (61007, "xfer-r:1:ab")

    replied = finished(moriio(producer=True, read=False), params)
    decode, notes = moriio(producer=False, read=False), []
    decode.send_notify_block = lambda **note: notes.append(note)
    decode.update_state_after_alloc(asked(transfer.decode_params(handover, replied)), BLOCKS, 16)

    # Each tensor-parallel rank of prefill is told of decode's blocks, at a port of its own.
    assert [(note["host"], note["port"]) for note in notes] == [
        ("10.0.0.1", 61005),
        ("10.0.0.1", 61006),
    ]
    assert {note["transfer_id"] for note in notes} == {written.transfer_id}
