"""Scheduler's side of vLLM's own encoder-cache connectors, and requests for it.

A fixture imports this module, as with `pieces`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.ec_transfer.ec_connector.cpu.scheduler import ECCPUScheduler
from vllm.distributed.ec_transfer.ec_connector.mooncake.scheduler import ECMooncakeScheduler
from vllm.distributed.ec_transfer.ec_connector.mooncake_store_embedding.data import TensorSpec

from tests.ec_store.vllm_connector.pieces import Pieces

RESOLVER = SimpleNamespace(fields_for=lambda _: {"image_grid_thw"})
"""Resolver that names the reported fields of a feature."""


def asked(pieces: Pieces, keys: Sequence[str], params: Mapping[str, Any] | None) -> Any:
    """Return a request with these features, made of placeholder metadata only."""
    features = [pieces.feature(key, media=False, offset=8 * n) for n, key in enumerate(keys)]
    request = pieces.request(*features)
    request.ec_transfer_params = None if params is None else dict(params)
    return request


class MooncakeProducer(ECMooncakeScheduler):  # type: ignore[misc]
    """Scheduler's side of an encode instance, without the engine that pushes."""

    def __init__(self) -> None:
        self._is_producer, self._is_consumer = True, False
        self._prepared_push_transfer_ids: set[str] = set()
        self._pushes_to_prepare: dict[str, Any] = {}
        self._metadata_resolver = RESOLVER

    def _encoder_output_spec(self, request: Any, index: int) -> TensorSpec:
        return TensorSpec((4, 8), "torch.float32", 128)

    def pushes(self, request: Any) -> list[tuple[str, str, str]]:
        """Return address, transfer id and key of each output that it would push."""
        assert self.ensure_cache_available(request, 0)
        specs, self._pushes_to_prepare = self._pushes_to_prepare.values(), {}
        return [(spec.consumer_zmq, spec.transfer_id, spec.mm_hash) for spec in specs]


def transfer_ids(request: Any) -> list[str | None]:
    """Return the transfer id that a consumer waits for, for each feature."""
    count = range(len(request.mm_features))
    return [ECMooncakeScheduler._request_transfer_id(request, index) for index in count]  # noqa: SLF001


@contextmanager
def memory(pieces: Pieces, role: str) -> Iterator[ECCPUScheduler]:
    """Run the scheduler's ECCPUConnector with NIXL."""
    config = pieces.transferring("ECCPUConnector", role, ec_enable_nixl=True, ec_cpu_bytes=2**20)
    width = config.model_config.get_inputs_embeds_size()
    config.ec_transfer_config.mm_encoder_output_widths = {"image": width}  # engines measure it
    scheduler = ECCPUScheduler(config)
    scheduler._metadata_resolver = RESOLVER  # noqa: SLF001
    try:
        yield scheduler
    finally:
        scheduler.shutdown()


def write(scheduler: ECCPUScheduler, request: Any, rows: torch.Tensor) -> None:
    """Do the work of the producer's worker after the feature is encoded."""
    scheduler.update_state_after_alloc(request, 0)
    [(key, blocks)] = scheduler._pending_saves.items()  # noqa: SLF001
    for block, row in zip(blocks, rows, strict=True):
        scheduler._region.blocks[block] = row.view(torch.uint8)  # noqa: SLF001
    scheduler._cache.mark_ready(key)  # noqa: SLF001


def read(scheduler: ECCPUScheduler, key: str) -> torch.Tensor:
    """Return the data that the consumer has received."""
    entry = scheduler._cache.get(key)  # noqa: SLF001
    blocks = [scheduler._region.blocks[block] for block in entry.block_ids]  # noqa: SLF001
    return torch.stack(blocks).view(torch.float32)
