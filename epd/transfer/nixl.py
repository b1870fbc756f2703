"""vLLM's NixlConnector: prefill keeps its blocks, decode reads them.

The wire is that of `vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py`.
"""

from epd.transfer.kv import KVTransfer, Pair
from epd.transfer.params import Params

KEEP: Params = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Make a prefill instance keep its blocks for decode."""


class Nixl(KVTransfer):
    """Decode reads prefill's blocks; in a conversation, prefill reads decode's of the last turn."""

    name = "nixl"
    bidirectional = True

    def prefill_params(self, pair: Pair, earlier: Params | None = None) -> Params:  # noqa: ARG002
        """Those that make it keep its blocks, and name those of the last turn."""
        if earlier is None:
            return KEEP
        return {**earlier, "do_remote_decode": True, "do_remote_prefill": False}
