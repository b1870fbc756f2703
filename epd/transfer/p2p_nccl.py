"""vLLM's P2pNcclConnector, which vLLM had until 0.31: the request's id says who sends to whom.

The wire is that of `vllm/distributed/kv_transfer/kv_connector/v1/p2p/p2p_nccl_connector.py`
(`parse_request_id`) and of its proxy,
`examples/online_serving/disaggregated_serving_p2p_nccl_xpyd/disagg_proxy_p2p_nccl_xpyd.py`.
"""

import hashlib

from epd.errors import UpstreamFailed
from epd.routing.instances import Instance, Role
from epd.transfer.kv import KVTransfer, Pair, host_and_ports
from epd.transfer.params import Params


class P2pNccl(KVTransfer):
    """Prefill sends its blocks to decode. Both need an address, `host:port` of their `kv_port`.

    Decode waits for the blocks of every request, without end.
    """

    name = "p2p-nccl"
    eager = True
    released = False
    needed = True
    named_apart = True
    addressed = frozenset({Role.PREFILL, Role.DECODE})

    def check(self, instance: Instance) -> None:
        """Refuse one that cannot be sent to, or asked."""
        super().check(instance)
        if instance.role in self.addressed:
            if not instance.kv_addr:
                raise ValueError(f"{self.name} needs the kv_addr of every {instance.role} instance")
            host_and_ports(instance.kv_addr, 1)

    def request_id(self, pair: Pair) -> str:
        """Both addresses, and an end that is no other request's."""
        if pair.decode is None or not (pair.prefill.kv_addr and pair.decode.kv_addr):
            raise UpstreamFailed("an instance has no kv_addr", slug="no_kv_addr", stage="prefill")
        # Digits behind a colon would be taken for the port.
        end = hashlib.sha256(pair.request_id.encode()).hexdigest()[:32]
        return f"___prefill_addr_{pair.prefill.kv_addr}___decode_addr_{pair.decode.kv_addr}_{end}"

    def prefill_params(self, pair: Pair) -> None:  # noqa: ARG002
        """None: the id says it."""
        return

    def decode_params(self, pair: Pair, replied: Params) -> None:  # noqa: ARG002
        """None: the id says it."""
        return
