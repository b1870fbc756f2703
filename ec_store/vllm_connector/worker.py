"""Worker's side of the connector: loads entries into the encoder cache, and saves them from it."""

import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from vllm.distributed import parallel_state
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata

from ec_store.arena.store import ArenaStore, HostPlace
from ec_store.base import Store
from ec_store.bounded import BoundedDict
from ec_store.counts import Counts
from ec_store.engine.accept import FiniteOnly
from ec_store.engine.backchannel import Sender
from ec_store.engine.encode_timer import EncodeTimer
from ec_store.engine.host_memory import HostMemory
from ec_store.engine.host_writer import HostWriter
from ec_store.engine.region import Place, SharedRegion
from ec_store.engine.sharing import EntryLoad
from ec_store.engine.tensors import DTYPES, HostCopies, HostTensor, Loader, Output, to_device
from ec_store.engine.writer import Write, Writer
from ec_store.entry import Entry
from ec_store.keys import EntryKey, key_or_none
from ec_store.vllm_connector.guard import count_exception

MAX_ITEMS = 4096
"""Upper bound of the items that a worker remembers: until they are encoded, and until their results
are sent to the scheduler."""

MAX_TOLD = 512
"""Upper bound of the results, and of the observations of each name, in one message."""


class Item(NamedTuple):
    """Modality and metadata of an item, without its tensor."""

    modality: str
    metadata: Mapping[str, Any]


@dataclass
class StepMetadata(ECConnectorMetadata):
    """Metadata that the scheduler's side sends to the workers for one step.

    Attributes:
        loads: entries to put into the encoder cache, by identifier.
        items: items of new requests, by identifier.
        learn: modality by identifier of items that are encoded here, to report their width.
        shared: shared memory that loads may be in; None without one.
        encodes: whether the step encodes items.
    """

    loads: dict[str, EntryLoad]
    items: dict[str, Item]
    learn: dict[str, str]
    shared: SharedRegion | None
    encodes: bool = False


class Saver:
    """Writer of encoded items, on a thread, which reports the results to the scheduler.

    Attributes:
        counts: counts that the scheduler gets.
        logged: names of the methods that have logged an exception.
        timer: timer of the encodes that the items come from.
    """

    def __init__(
        self, store: Store, namespace: str, queue_bytes: int, sender: Sender, counts: Counts
    ) -> None:
        """Start the writer's thread. The saver closes the sender."""
        self._store = store
        self._namespace = namespace
        self._sender = sender
        self.counts = counts
        self.logged: set[str] = set()
        self.timer = EncodeTimer()
        self._copies = HostCopies(queue_bytes)
        self._accept = FiniteOnly(counts, "it was encoded here and is not stored")
        self._host = HostWriter(store, self._accept) if isinstance(store, ArenaStore) else None
        self._items: BoundedDict[str, Item] = BoundedDict(MAX_ITEMS)
        self._lock = threading.Lock()
        self._outcomes: BoundedDict[str, bool] = BoundedDict(MAX_ITEMS)
        self._introduced = False
        self._writer = Writer(
            store,
            counts=counts,
            queue_bytes=queue_bytes,
            asks=self._host is None,
            done=self._remember,
        )

    def expect_items(
        self, items: Mapping[str, Item], encoder_cache: Mapping[str, torch.Tensor]
    ) -> None:
        """Save items of new requests that an earlier step has encoded: the store may lack them."""
        for identifier, item in items.items():
            self._items[identifier] = item
        for identifier in items:
            if identifier in encoder_cache:
                self.save(identifier, encoder_cache[identifier])

    def save(self, identifier: str, tensor: torch.Tensor) -> None:
        """Copy an item's tensor and queue it for writing.

        Beside a host's memory the tensor is kept until the writer's thread has copied it there.

        An item that is not queued is reported as such: a reply must not name it.
        """
        item = self._items.get(identifier)
        key = key_or_none(self._namespace, identifier)
        if item is None or key is None:
            return
        write = None
        try:
            write = self._begin_write(key, tensor, item)
        except Exception as error:  # noqa: BLE001 - it costs this item, and no other one
            count_exception(self, "Saver.save", error)
        if write is None:
            self.counts.add(drops=1)
        if write is None or not self._writer.submit(key, tensor.nbytes, write):
            self._remember(key, stored=False)

    def save_encoded(self, identifier: str, tensor: torch.Tensor) -> None:
        """Save an item that this step has encoded."""
        if (item := self._items.get(identifier)) is not None:
            self.timer.add(item.modality, tensor.nbytes)
        self.save(identifier, tensor)

    def close(self) -> None:
        """Write the queued entries, for a bounded time, and report the results."""
        self._writer.close()
        self._copies.close()
        self.send_reports()
        self._sender.close()

    def send_reports(self) -> None:
        """Send results to the scheduler; results that do not fit are sent later.

        The first message is sent even without results: the scheduler compares the namespaces.
        Call it once in a step: the kernel queues few messages, and the scheduler reads them only
        between steps.
        """
        with self._lock:
            self._observe(self._store.counts.take_observations())
            outcomes = dict(islice(self._outcomes.items(), MAX_TOLD))
            counts = self.counts.take_counts()
            observations = self.counts.take_observations(MAX_TOLD)
            results = {"outcomes": outcomes, "counts": counts, "observations": observations}
            if self._introduced and not any(results.values()):
                return
            if self._sender.send({"namespace": self._namespace, **results}):
                self._introduced = True
                for digest in outcomes:
                    del self._outcomes[digest]
            else:
                self.counts.add(**counts)
                self._observe(observations)

    def _observe(self, observations: Mapping[str, Sequence[float]]) -> None:
        for name, values in observations.items():
            self.counts.observe(name, *values)

    def _begin_write(self, key: EntryKey, tensor: torch.Tensor, item: Item) -> Write | None:
        """Return the function that writes an item; None if the ring has no room for its copy."""
        encode_s = self.timer.estimate_s(item.modality, tensor.nbytes)
        if self._host is not None:
            return functools.partial(self._host.put, key, Output(tensor), *item, encode_s)
        copied = self._copies.start(tensor)
        return functools.partial(self._put_copy, key, copied, item, encode_s) if copied else None

    def _put_copy(
        self, key: EntryKey, copied: HostTensor, item: Item, encode_s: float
    ) -> bool | None:
        host = copied()
        data = memoryview(host.view(torch.uint8).reshape(-1).numpy()).cast("B")
        entry = Entry(data, DTYPES[host.dtype], tuple(host.shape), *item, encode_s)
        return self._store.put(key, entry) if self._accept(entry) else None

    def _remember(self, key: EntryKey, stored: bool) -> None:
        with self._lock:
            self._outcomes[key.digest] = stored


class Learner:
    """Reporter of the width of this model's encoder outputs to the scheduler.

    vLLM measures it on producers only. A consumer that encodes an item itself sees it too.
    """

    def __init__(self, sender: Sender, counts: Counts) -> None:
        """Create the learner. It reports the counts too, and closes the sender."""
        self._sender = sender
        self.counts = counts
        self._items: BoundedDict[str, str] = BoundedDict(MAX_ITEMS)
        self._cache: Mapping[str, torch.Tensor] = {}

    def expect_items(
        self, items: Mapping[str, str], encoder_cache: Mapping[str, torch.Tensor]
    ) -> None:
        """Look for items, modality by identifier, in the encoder cache at the end of a step."""
        self._items.update(items)
        self._cache = encoder_cache

    def send_reports(self) -> None:
        """Report the widths of items that are encoded; a report that fails is sent later.

        One item of a modality is enough: the others are dropped.
        """
        widths = {
            modality: int(self._cache[identifier].shape[-1])
            for identifier, modality in self._items.items()
            if identifier in self._cache
        }
        counts = self.counts.take_counts()
        if not widths and not counts:
            return
        if self._sender.send({"widths": widths, "counts": counts}):
            for identifier, modality in list(self._items.items()):
                if modality in widths:
                    del self._items[identifier]
        else:
            self.counts.add(**counts)

    def close(self) -> None:
        self._sender.close()


def load(
    loader: Loader,
    step: StepMetadata,
    encoder_cache: dict[str, torch.Tensor],
    host: HostMemory | None = None,
) -> None:
    """Put a step's entries into the encoder cache, and do nothing else.

    An exception before the last entry ends the engine.

    Raises:
        RuntimeError: the device failed, or a place is in memory that this worker has not mapped.
    """
    for identifier, item in step.loads.items():
        if identifier not in encoder_cache:
            parts = _parts(item.raw, loader, host)
            encoder_cache[identifier] = to_device(parts, item.dtype, item.shape)


def _parts(
    raw: torch.Tensor | Place | HostPlace, loader: Loader, host: HostMemory | None
) -> Sequence[torch.Tensor]:
    if isinstance(raw, torch.Tensor):
        return [raw]
    if isinstance(raw, Place):
        return [loader.view(raw)]
    if host is None:
        raise RuntimeError("an entry is in a host's memory, and this worker maps none")
    return host.parts(raw)


def reader() -> int | None:
    """Return this worker's index among those that load entries; None if it loads none.

    Only the first pipeline stage has the embeddings.
    """
    if not parallel_state.get_pp_group().is_first_rank:
        return None
    context = parallel_state.get_pcp_group().rank_in_group
    readers = context * parallel_state.get_tensor_model_parallel_world_size()
    return int(readers + parallel_state.get_tensor_model_parallel_rank())


def is_writer() -> bool:
    """Return whether this worker writes, as the only one of those with the same tensors.

    All ranks of a tensor-parallel group and of a prefill-context-parallel group encode every item.
    """
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    return bool(tensor_rank == 0 and parallel_state.get_pcp_group().rank_in_group == 0)
