"""LMCache: decode finds prefill's blocks by their tokens, in a store or where prefill wrote them.

The wire is that of `LMCacheConnectorV1Impl.update_state_after_alloc` in
`vllm/distributed/kv_transfer/kv_connector/v1/lmcache_integration/vllm_v1_adapter.py` of vLLM 0.33,
and of LMCache's `examples/disagg_prefill/disagg_proxy_server.py`.
"""

from epd.routing.instances import Instance, Role
from epd.transfer.kv import KVTransfer, Pair, host_and_ports
from epd.transfer.params import Params


class LMCache(KVTransfer):
    """Prefill is told where decode's LMCache is, where it has an address; else nobody anything.

    An address is `host:init:alloc`: its `pd_peer_host`, `pd_peer_init_port`, `pd_peer_alloc_port`;
    ports of several tensor-parallel ranks as `7300+7301`.
    """

    name = "lmcache"
    eager = True
    released = False
    named_apart = True
    addressed = frozenset({Role.DECODE})

    def check(self, instance: Instance) -> None:
        """Refuse a `kv_addr` that is none of decode's LMCache."""
        super().check(instance)
        if instance.kv_addr:
            host_and_ports(instance.kv_addr, 2)

    def prefill_params(self, pair: Pair) -> Params | None:
        """Where the blocks go."""
        if pair.decode is None or not pair.decode.kv_addr:
            return None
        host, init, alloc = host_and_ports(pair.decode.kv_addr, 2)
        return {
            "disagg_spec": {
                "req_id": pair.request_id,
                "receiver_host": host,
                "receiver_init_port": [int(port) for port in init.split("+")],
                "receiver_alloc_port": [int(port) for port in alloc.split("+")],
            }
        }

    def decode_params(self, pair: Pair, replied: Params) -> None:  # noqa: ARG002
        """None: decode looks for itself."""
        return
