"""Entries for a step's workers: by place in memory that they have mapped, otherwise by value."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ec_store.arena.store import ArenaStore, HostPlace, PlacedEntry
from ec_store.base import Store
from ec_store.engine.region import Place, Region, SharedRegion
from ec_store.engine.tensors import as_tensor
from ec_store.engine.threads import PeriodicThread
from ec_store.entry import HeldEntry
from ec_store.keys import EntryKey

logger = logging.getLogger("vllm.ec_store")


class EntryLoad(NamedTuple):
    """Entry to put into the encoder cache.

    Attributes:
        raw: place of the bytes in the shared memory, or in the host's memory; or the bytes, uint8,
            as a torch tensor, which vLLM sends to several ranks through shared memory of its own
            (`ShmTensorArena`).
        dtype: dtype of the tensor, as `Entry.dtype`.
    """

    raw: torch.Tensor | Place | HostPlace
    dtype: str
    shape: tuple[int, ...]


class Sharing:
    """Source of the entries that the scheduler fetches, and maker of the loads of its steps.

    Without shared memory, and in memory that a worker has not mapped, entries go by value.
    """

    def __init__(self, store: Store, region: Region | None) -> None:
        self._store = store
        self._region = region
        self._logged = False

    def start(self) -> None:
        """Start its thread, if it needs one and has not started it."""

    def close(self) -> None:
        """End its thread, if it has one, and close the shared memory."""
        if self._region is not None:
            self._region.close()

    def get(self, key: EntryKey) -> HeldEntry | None:
        """Fetch an entry, as `Store.get`, into the shared memory if it has room."""
        entry = self._store.get(key)
        shared = None if entry is None or self._region is None else self._region.copy_in(entry.data)
        return entry if entry is None or shared is None else replace(entry, data=shared)

    def loads(self, entries: Mapping[str, HeldEntry]) -> dict[str, EntryLoad]:
        """Return the next step's loads, by identifier.

        An entry that they refer to by its place stays until all workers have loaded it.
        """
        region = self._region
        if region is None:
            return make_loads(entries)
        places = {
            identifier: place
            for identifier, entry in entries.items()
            if (place := self._find_place(entry, region)) is not None
        }
        if places and not self._logged:
            self._logged = True
            logger.info("all workers have mapped the shared memory: steps refer to entries in it")
        loads = make_loads(entries, places)
        region.send([entries[identifier] for identifier in places])
        return loads

    def shared_region(self) -> SharedRegion | None:
        """Return the step's description of the shared memory, after its loads."""
        return None if self._region is None else self._region.shared_region()

    def _find_place(self, entry: HeldEntry, region: Region) -> Place | HostPlace | None:
        """Return the place of an entry for the next step, if all workers have mapped it."""
        return region.find_place(entry.parts[0]) if region.is_mapped() else None


class HostSharing(Sharing):
    """Source of the entries in a host's memory, which stay pinned there while they are needed.

    The region beside it has no entries. A thread releases pins while the engine is idle.
    """

    def __init__(self, store: ArenaStore, region: Region) -> None:
        super().__init__(store, region)
        self._pin = store.pin

        def release_pins() -> bool:
            region.release()
            store.connection.settle()
            return False

        self._thread = PeriodicThread(release_pins)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._thread.close()
        super().close()

    def get(self, key: EntryKey) -> HeldEntry | None:
        """Pin an entry in the host's memory."""
        return self._pin(key)

    def _find_place(self, entry: HeldEntry, region: Region) -> HostPlace | None:
        if isinstance(entry, PlacedEntry) and region.have_mapped(entry.place.arena):
            return entry.place
        return None


def open_sharing(store: Store, region_bytes: int, parallel_config: Any) -> Sharing:
    """Return the sharing of an engine, with shared memory if its workers can map it."""
    host = isinstance(store, ArenaStore)
    region = _make_region(region_bytes, parallel_config, host=host)
    if isinstance(store, ArenaStore) and region is not None:
        return HostSharing(store, region)
    return Sharing(store, region)


def make_loads(
    entries: Mapping[str, HeldEntry], places: Mapping[str, Place | HostPlace] | None = None
) -> dict[str, EntryLoad]:
    """Return loads with the places of entries, and with the bytes of those without a place."""
    places = places or {}
    return {
        identifier: EntryLoad(
            places.get(identifier) or _in_one_tensor(entry), entry.dtype, entry.shape
        )
        for identifier, entry in entries.items()
    }


def _in_one_tensor(entry: HeldEntry) -> torch.Tensor:
    """Return the bytes of an entry, copied if they are in several parts."""
    parts = [as_tensor(part) for part in entry.parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _make_region(size_bytes: int, parallel_config: Any, *, host: bool) -> Region | None:
    """Allocate shared memory, if several workers on this machine load entries.

    Beside the memory of a `host` it is the page for the workers' reports, for one worker too.
    Without it entries travel in each step's metadata. With several hosts they do too: a worker that
    read the store itself could miss an entry that the others have, and a missing entry in a step
    ends the engine.
    """
    apart = parallel_config.distributed_executor_backend in {"mp", "ray"}
    # Only the first pipeline stage has the embeddings.
    readers = parallel_config.world_size // parallel_config.pipeline_parallel_size
    needed = host or (size_bytes and apart and readers > 1)
    if not needed or parallel_config.nnodes > 1:
        return None
    try:
        return Region(0 if host else size_bytes, readers)
    except (OSError, ValueError) as error:
        logger.warning(
            "no shared memory of %d bytes for %d workers, so entries are sent with each step: %s. "
            "Set region_bytes in ec_connector_extra_config.",
            size_bytes,
            readers,
            error,
        )
        return None
