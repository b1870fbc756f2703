"""Entries in memory that the scheduler's process shares with its workers."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ec_store.device.region import Region, Shared
from ec_store.device.tensors import as_tensor
from ec_store.entry import Entry
from ec_store.fetcher import Source
from ec_store.keys import EntryKey
from ec_store.vllm_connector.step import Load

logger = logging.getLogger("vllm.ec_store")


class Sharing:
    """Source of entries for workers: by place if in shared memory, otherwise by value."""

    def __init__(self, store: Source, region: Region | None) -> None:
        """Wrap a source of entries.

        Args:
            store: source of the entries.
            region: shared memory; None if the workers are not in other processes.
        """
        self._store = store
        self._region = region
        self._mapped = False

    def get(self, key: EntryKey) -> Entry | None:
        """Fetch an entry, as `Store.get`, into the shared memory if it has room."""
        entry = self._store.get(key)
        if entry is None or self._region is None:
            return entry
        shared = self._region.place(entry.data)
        return entry if shared is None else replace(entry, data=shared)

    def loads(self, entries: Mapping[str, Entry]) -> dict[str, Load]:
        """Return the next step's loads, by identifier.

        An entry in the shared memory stays until all workers have loaded it.
        """
        region = self._mapped_region()
        loads, sent = {}, []
        for identifier, entry in entries.items():
            place = None if region is None else region.find(entry.data)
            if place is not None:
                sent.append(entry.data)
            raw = as_tensor(entry.data) if place is None else place
            loads[identifier] = Load(raw, entry.dtype, entry.shape)
        if self._region is not None:
            self._region.send(sent)
        return loads

    def shared(self) -> Shared | None:
        """Return the next step's description of the shared memory."""
        return None if self._region is None else self._region.shared()

    def _mapped_region(self) -> Region | None:
        """Return the shared memory, once all workers have mapped it."""
        if self._region is None or not self._region.is_mapped():
            return None
        if not self._mapped:
            self._mapped = True
            logger.info("all workers have mapped the shared memory: steps refer to entries in it")
        return self._region

    def close(self) -> None:
        """Close the shared memory. Workers keep their mappings."""
        if self._region is not None:
            self._region.close()


def by_value(entries: Mapping[str, Entry]) -> dict[str, Load]:
    """Return loads with the bytes of entries, in shared memory or not."""
    return {
        identifier: Load(as_tensor(entry.data), entry.dtype, entry.shape)
        for identifier, entry in entries.items()
    }


def make_region(size_bytes: int, parallel_config: Any) -> Region | None:
    """Allocate shared memory, if several workers on this machine load entries.

    Without it entries travel in each step's metadata. With several hosts they do too: a worker that
    read the store itself could miss an entry that the others have, and a missing entry in a step
    ends the engine.

    Args:
        size_bytes: memory for entries; 0 for none.
        parallel_config: vLLM's `ParallelConfig`.
    """
    apart = parallel_config.distributed_executor_backend in {"mp", "ray"}
    # Only the first pipeline stage has the embeddings.
    readers = parallel_config.world_size // parallel_config.pipeline_parallel_size
    if not size_bytes or not apart or readers < 2 or parallel_config.nnodes > 1:  # noqa: PLR2004
        return None
    try:
        return Region(size_bytes, readers)
    except (OSError, ValueError) as error:
        logger.warning(
            "no shared memory of %d bytes for %d workers, so entries are sent with each step: %s. "
            "Set region_bytes in ec_connector_extra_config.",
            size_bytes,
            readers,
            error,
        )
        return None
