"""vLLM's MoRIIOConnector, for GPUs of AMD: decode reads prefill's blocks, or prefill writes them.

The wire is that of `vllm/distributed/kv_transfer/kv_connector/v1/moriio/` of vLLM 0.33:
`MoRIIOConnectorMetadata.add_new_req` in `moriio_common.py`, and `request_finished` in
`moriio_connector.py`.
"""

from epd.routing.instances import Instance, Role
from epd.transfer import Params, with_reachable_host
from epd.transfer.kv import Handover, KVTransfer, host_and_ports


class MoRIIO(KVTransfer):
    """Transfer in which both instances know a prefill by the same transfer id.

    Decode instances without an address read (`read_mode`). An address is `host:handshake:notify`:
    the `handshake_port` and `notify_port` of a decode instance, to which prefill writes. Instances
    that write have the same number of tensor-parallel ranks.
    """

    name = "moriio"
    eager = True
    named_apart = True
    addressed = frozenset({Role.DECODE})

    def check(self, instance: Instance) -> None:
        super().check(instance)
        if instance.kv_addr:
            _, *ports = host_and_ports(instance.kv_addr, 2)
            if any("+" in port for port in ports):
                raise ValueError(f"{instance.kv_addr!r} has more than one port for a use")

    def prefill_params(self, handover: Handover) -> Params:
        """Return the parameters that make prefill keep its blocks, or write them to decode."""
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": f"xfer-{handover.request_id}",
        }
        if handover.decode is None or not handover.decode.kv_addr:
            return params
        host, handshake, notify = host_and_ports(handover.decode.kv_addr, 2)
        return {
            **params,
            "remote_host": host.strip("[]"),
            "remote_handshake_port": int(handshake),
            "remote_notify_port": int(notify),
            # The connector reads both without a default, and finds their values by itself.
            "remote_engine_id": None,
            "remote_block_ids": None,
        }

    def decode_params(self, handover: Handover, replied: Params) -> Params | None:
        params = super().decode_params(handover, replied)
        return None if params is None else with_reachable_host(params, handover.prefill.url)
