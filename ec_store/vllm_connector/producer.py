"""Scheduler's side of a producer, and entries in memory shared with the workers that load them."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.distributed.ec_transfer.ec_connector.utils import (
    PlaceholderMetadataResolver,
    collect_ec_item_metadata,
)

from ec_store.arena.store import ArenaStore, HostPlace, PlacedEntry
from ec_store.bounded import BoundedDict
from ec_store.engine.fetcher import EntrySource
from ec_store.engine.host_memory import Turns
from ec_store.engine.region import Place, Region
from ec_store.engine.tensors import as_tensor
from ec_store.entry import Entry, HeldEntry
from ec_store.keys import EntryKey, key_or_none
from ec_store.vllm_connector.worker import EntryLoad, Item

logger = logging.getLogger("vllm.ec_store")

MAX_LOST = 4096
"""Upper bound of the failed writes that are remembered, by digest."""


class Producer:
    """Source of the items that workers save, and of the entries that replies name."""

    def __init__(self, namespace: str, resolver: PlaceholderMetadataResolver) -> None:
        self._namespace = namespace
        self._resolver = resolver
        self._lost: BoundedDict[str, None] = BoundedDict(MAX_LOST)
        self._written_to: str | None = None

    def items(self, new_requests: Sequence[Any]) -> dict[str, Item]:
        """Return modality and metadata of new requests' items, by identifier."""
        items = {}
        for request in new_requests:
            modalities = {feature.identifier: feature.modality for feature in request.mm_features}
            reported = collect_ec_item_metadata(request.mm_features, self._resolver)
            for identifier, item in reported.items():
                items[identifier] = Item(modalities[identifier], item["metadata"])
        return items

    def report(self, request: Any) -> dict[str, Any] | None:
        """Return the items that a finished request's reply names: stored, or being written.

        Return None if the workers write to another namespace: a consumer would wait for entries
        that never appear.
        """
        if self._written_to not in {None, self._namespace}:
            return None
        items = {
            identifier: {**item, "namespace": self._namespace}
            for identifier, item in collect_ec_item_metadata(
                request.mm_features, self._resolver
            ).items()
            if (key := key_or_none(self._namespace, identifier)) and key.digest not in self._lost
        }
        return items or None

    def handle_message(self, message: dict[str, Any]) -> None:
        """Process a worker's message: the namespace it writes to, and the results of its writes."""
        written_to = message.get("namespace")
        if written_to not in {None, self._namespace, self._written_to}:
            self._written_to = written_to
            logger.error(
                "this engine derives two namespaces: its worker writes encoder outputs to %s, its "
                "scheduler names and reads %s. Its entries would not be found, so its replies name "
                "no entries and media are sent to prefill and decode. Make sure that all of its "
                "hosts have the same vLLM, the same ec_store and the same files of the model; "
                "if they have, report the model's architecture with both names.",
                written_to,
                self._namespace,
            )
        for digest, stored in message.get("outcomes", {}).items():
            if stored:
                self._lost.pop(digest, None)
            else:
                self._lost[digest] = None


class Sharing:
    """Source of entries for workers: by place if in shared memory, otherwise by value."""

    def __init__(self, store: EntrySource, region: Region) -> None:
        self._store = store
        self._region = region
        self._logged = False

    def start(self) -> None:
        """Start its thread, if it needs one and has not started it."""

    def close(self) -> None:
        """End its thread, if it has one."""

    def get(self, key: EntryKey) -> HeldEntry | None:
        """Fetch an entry, as `Store.get`, into the shared memory if it has room."""
        entry = self._store.get(key)
        if not isinstance(entry, Entry):
            return entry
        shared = self._region.copy_in(entry.data)
        return entry if shared is None else replace(entry, data=shared)

    def loads(self, entries: Mapping[str, HeldEntry]) -> dict[str, EntryLoad]:
        """Return the next step's loads, by identifier.

        An entry that they refer to by its place stays until all workers have loaded it.
        """
        loads, sent = {}, []
        for identifier, entry in entries.items():
            place = self._find_place(entry)
            if place is not None:
                sent.append(entry)
                if not self._logged:
                    self._logged = True
                    logger.info(
                        "all workers have mapped the shared memory: steps refer to entries in it"
                    )
            raw = in_one_tensor(entry) if place is None else place
            loads[identifier] = EntryLoad(raw, entry.dtype, entry.shape)
        self._region.send(sent)
        return loads

    def _find_place(self, entry: HeldEntry) -> Place | HostPlace | None:
        """Return the place of an entry for the next step, if all workers have mapped it."""
        return self._region.find_place(entry.parts[0]) if self._region.is_mapped() else None


class HostSharing(Sharing):
    """Source of entries for workers: by place if they have mapped the memory of the host.

    The region beside it has no entries. A thread releases pins while the engine is idle.
    """

    def __init__(self, store: ArenaStore, region: Region) -> None:
        super().__init__(store, region)
        self._pin = store.pin
        self._connection = store.connection
        self._turns = Turns(self._turn)

    def start(self) -> None:
        self._turns.start()

    def close(self) -> None:
        self._turns.close()

    def get(self, key: EntryKey) -> HeldEntry | None:
        """Pin an entry in the host's memory."""
        return self._pin(key)

    def _find_place(self, entry: HeldEntry) -> HostPlace | None:
        if isinstance(entry, PlacedEntry) and self._region.have_mapped(entry.place.arena):
            return entry.place
        return None

    def _turn(self) -> bool:
        self._region.release()
        self._connection.settle()
        return False


def in_one_tensor(entry: HeldEntry) -> torch.Tensor:
    """Return the bytes of an entry, copied if they are in several parts."""
    parts = [as_tensor(part) for part in entry.parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def by_value(entries: Mapping[str, HeldEntry]) -> dict[str, EntryLoad]:
    """Return loads with the bytes of entries."""
    return {
        identifier: EntryLoad(in_one_tensor(entry), entry.dtype, entry.shape)
        for identifier, entry in entries.items()
    }


def make_region(size_bytes: int, parallel_config: Any, *, host: bool) -> Region | None:
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
