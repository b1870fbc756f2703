"""The connector in a worker: entries into the encoder cache, and out of it."""

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import islice

import torch

from ec_store.backchannel import Sender
from ec_store.base import Store
from ec_store.counts import Counts
from ec_store.entry import Entry
from ec_store.keys import EntryKey, key_or_none
from ec_store.vllm_connector.step import Item, StepMetadata
from ec_store.vllm_connector.tensors import DTYPES, HostCopies, to_device
from ec_store.writer import Writer

MAX_ITEMS = 4096
"""How many items a worker remembers: until they are encoded, and until the scheduler was told."""

MAX_TOLD = 512
"""How many outcomes go into one message."""


class Saver:
    """Stores what was encoded, on a thread, and tells the scheduler what became of it."""

    def __init__(
        self, store: Store, namespace: str, queue_bytes: int, sender: Sender, counts: Counts
    ) -> None:
        """Start the thread.

        Args:
            store: where entries go.
            namespace: whose they are.
            queue_bytes: how much may wait to be written.
            sender: tells the scheduler; closed with the saver.
            counts: gets what is counted.
        """
        self._namespace = namespace
        self._sender = sender
        self._counts = counts
        self._copies = HostCopies()
        self._items: OrderedDict[str, Item] = OrderedDict()
        self._lock = threading.Lock()
        self._outcomes: OrderedDict[str, bool] = OrderedDict()
        self._writer = Writer(store, counts=counts, queue_bytes=queue_bytes, done=self._remember)

    def expect(self, items: Mapping[str, Item], encoder_cache: Mapping[str, torch.Tensor]) -> None:
        """Save items of new requests that an earlier step has encoded: the store may lack them."""
        for identifier, item in items.items():
            self._items[identifier] = item
            self._items.move_to_end(identifier)
            if identifier in encoder_cache:
                self.save(identifier, encoder_cache[identifier])
        while len(self._items) > MAX_ITEMS:
            self._items.popitem(last=False)

    def save(self, identifier: str, tensor: torch.Tensor) -> None:
        """Have an item stored that was just encoded."""
        item = self._items.get(identifier)
        key = key_or_none(self._namespace, identifier)
        if item is None or key is None:
            return
        make = functools.partial(_entry, self._copies.later(tensor), item)
        if not self._writer.submit(key, tensor.nbytes, make):
            self._remember(key, stored=False)

    def close(self) -> None:
        """Write what waits, for a bounded time."""
        self._writer.close()
        self.tell()
        self._sender.close()

    def tell(self) -> None:
        """Tell the scheduler what became of entries; what it has no room for now goes later.

        Once in a step: the kernel queues few messages, and the scheduler hears them only between
        steps.
        """
        with self._lock:
            outcomes = dict(islice(self._outcomes.items(), MAX_TOLD))
            counts = self._counts.take()
            if not outcomes and not counts:
                return
            if self._sender.send({"outcomes": outcomes, "counts": counts}):
                for digest in outcomes:
                    del self._outcomes[digest]
            else:
                self._counts.add(**counts)

    def _remember(self, key: EntryKey, stored: bool) -> None:
        with self._lock:
            self._outcomes[key.digest] = stored
            while len(self._outcomes) > MAX_ITEMS:
                self._outcomes.popitem(last=False)


def load(step: StepMetadata, encoder_cache: dict[str, torch.Tensor]) -> None:
    """Put a step's entries into the encoder cache.

    All that can be wrong with an entry was checked before the step: what could still fail here is
    the device itself.
    """
    for identifier, (raw, dtype, shape) in step.loads.items():
        if identifier not in encoder_cache:
            encoder_cache[identifier] = to_device(raw, dtype, shape)


def writes() -> bool:
    """Whether this worker is the one of its tensor-parallel group that writes."""
    from vllm.distributed.parallel_state import (  # noqa: PLC0415 - known once workers are up
        get_tensor_model_parallel_rank,
    )

    return bool(get_tensor_model_parallel_rank() == 0)


def _entry(copy: Callable[[], torch.Tensor], item: Item) -> Entry:
    host = copy()
    data = memoryview(host.view(torch.uint8).reshape(-1).numpy()).cast("B")
    return Entry(data, DTYPES[host.dtype], tuple(host.shape), item.modality, item.metadata)
