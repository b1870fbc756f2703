"""vLLM's ECCPUConnector with `ec_enable_nixl`: consumers read outputs from the encode instance.

The wire is that of `vllm/distributed/ec_transfer/ec_connector/cpu/scheduler/__init__.py`:
`request_finished` says where an output is, `_admit_item` reads that. Any number of consumers can
read one, for as long as it is not evicted (first in, first out, `embedding_cache.py`); then the
request fails where it has no media, and can be sent once more with them.
"""

from epd.transfer.ec import ECTransfer


class ECNixl(ECTransfer):
    """Outputs stay in the encode instance's memory; its address goes on to the consumer."""

    name = "nixl"
    handle = ("peer_host", "peer_port", "size_bytes", "shape")
