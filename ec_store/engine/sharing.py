"""Entries for a step's workers: by place in the host's memory, otherwise by value."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ec_store.arena.store import ArenaStore, HostPlace, PlacedEntry
from ec_store.engine.region import Region, SharedRegion
from ec_store.engine.tensors import as_tensor
from ec_store.engine.threads import PeriodicThread
from ec_store.entry import HeldEntry

logger = logging.getLogger("vllm.ec_store")


class EntryLoad(NamedTuple):
    """Entry to put into the encoder cache.

    Attributes:
        raw: place of the bytes in the host's memory; or the bytes, uint8, as a torch tensor, which
            vLLM sends to several ranks through shared memory of its own (`ShmTensorArena`).
        dtype: dtype of the tensor, as `Entry.dtype`.
    """

    raw: torch.Tensor | HostPlace
    dtype: str
    shape: tuple[int, ...]


class Sharing:
    """Maker of the loads of steps, with entries in the host's memory.

    They stay pinned there while they are needed: a step has their places, or their bytes until all
    workers have mapped the memory. A thread releases pins while the engine is idle.
    """

    def __init__(self, store: ArenaStore, region: Region) -> None:
        self._region = region
        self._logged = False

        def release_pins() -> bool:
            region.release()
            store.connection.settle()
            return False

        self._thread = PeriodicThread(release_pins)

    def start(self) -> None:
        """Start the thread, unless it was started before."""
        self._thread.start()

    def close(self) -> None:
        self._thread.close()
        self._region.close()

    def loads(self, entries: Mapping[str, HeldEntry]) -> dict[str, EntryLoad]:
        """Return the next step's loads, by identifier.

        An entry that they refer to by its place stays until all workers have loaded it.
        """
        places = {
            identifier: entry.place
            for identifier, entry in entries.items()
            if isinstance(entry, PlacedEntry) and self._region.have_mapped(entry.place.arena)
        }
        if places and not self._logged:
            self._logged = True
            logger.info("all workers have mapped the shared memory: steps refer to entries in it")
        loads = make_loads(entries, places)
        self._region.send([entries[identifier] for identifier in places])
        return loads

    def shared_region(self) -> SharedRegion:
        """Return the step's description of the page of reports, after its loads."""
        return self._region.shared_region()


def open_sharing(store: ArenaStore, parallel_config: Any) -> Sharing | None:
    """Return the sharing of an engine; None if its workers are on several hosts.

    Entries travel in each step's metadata then. A worker that read the store itself could miss an
    entry that the others have, and a missing entry in a step ends the engine.
    """
    if parallel_config.nnodes > 1:
        return None
    # Only the first pipeline stage has the embeddings.
    readers = parallel_config.world_size // parallel_config.pipeline_parallel_size
    try:
        return Sharing(store, Region(readers))
    except (OSError, ValueError) as error:
        logger.warning(
            "no shared memory for reports of %d workers, so entries are sent with each step: %s",
            readers,
            error,
        )
        return None


def make_loads(
    entries: Mapping[str, HeldEntry], places: Mapping[str, HostPlace] | None = None
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
