"""`ECStoreConnector`: vLLM's encoder cache on any store of this package.

    --ec-transfer-config '{"ec_connector": "ECStoreConnector",
        "ec_connector_module_path": "ec_store.vllm_connector", "ec_role": "ec_producer",
        "ec_connector_extra_config": {"store": "file:///dev/shm/ec?max_bytes=8GiB"}}'

Roles: `ec_producer`, `ec_consumer`, `ec_both`. The interface is
`vllm/distributed/ec_transfer/ec_connector/base.py` of vLLM 0.32 and 0.33.

No fault of the store fails a request that could be served without it, and none ends an engine. The
scheduler's side accesses neither disk nor network: threads fetch entries while their requests wait,
and the entries are in this process's memory before a step depends on them. They reach the workers
with the step's metadata.

Only this package imports vLLM, and only it and `ec_store.engine` import torch.
"""

from ec_store.vllm_connector.connector import ECStoreConnector

__all__ = ["ECStoreConnector"]
