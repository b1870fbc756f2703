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
    """Hands entries on to workers: those in shared memory by their place, the others by value."""

    def __init__(self, store: Source, region: Region | None) -> None:
        """Share nothing yet.

        Args:
            store: where entries are fetched from.
            region: the shared memory; None where workers are not in other processes.
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
        """Return what the next step loads, by identifier.

        What is in the shared memory stays until all workers have loaded it.
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
        """Return what the next step says of the shared memory."""
        return None if self._region is None else self._region.shared()

    def _mapped_region(self) -> Region | None:
        """Return the shared memory, once all workers have it."""
        if self._region is None or not self._region.is_mapped():
            return None
        if not self._mapped:
            self._mapped = True
            logger.info("all workers have mapped the shared memory: steps have places in it")
        return self._region

    def close(self) -> None:
        """Share no more. Workers keep what they have mapped."""
        if self._region is not None:
            self._region.close()


def by_value(entries: Mapping[str, Entry]) -> dict[str, Load]:
    """Return loads that bring the bytes of entries, wherever those are."""
    return {
        identifier: Load(as_tensor(entry.data), entry.dtype, entry.shape)
        for identifier, entry in entries.items()
    }


def make_region(size_bytes: int, parallel_config: Any) -> Region | None:
    """Allocate shared memory, if several workers in processes of this machine load entries.

    Without it entries travel in each step's metadata. That is so as well with several hosts: a
    worker that reads the store itself may miss what the others have, and a step's entry that is
    missing ends the engine.

    Args:
        size_bytes: for entries; 0: none.
        parallel_config: vLLM's.
    """
    apart = parallel_config.distributed_executor_backend in {"mp", "ray"}
    # The first pipeline stage alone has the embeddings.
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
