"""The connector in a worker: entries into the encoder cache, and out of it."""

import functools
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import islice

import torch

from ec_store.backchannel import Sender
from ec_store.base import Store
from ec_store.counts import Counts
from ec_store.device.copies import HostCopies, HostTensor
from ec_store.device.loads import Loader
from ec_store.device.tensors import DTYPES
from ec_store.entry import Entry
from ec_store.keys import EntryKey, key_or_none
from ec_store.vllm_connector.finite import FiniteOnly
from ec_store.vllm_connector.step import Item, StepMetadata
from ec_store.writer import Writer

MAX_ITEMS = 4096
"""How many items a worker remembers: until they are encoded, and until the scheduler was told."""

MAX_TOLD = 512
"""How many outcomes, and observations of each name, go into one message."""


class Saver:
    """Stores what was encoded, on a thread, and tells the scheduler what became of it."""

    def __init__(
        self, store: Store, namespace: str, queue_bytes: int, sender: Sender, counts: Counts
    ) -> None:
        """Start the thread.

        Args:
            store: where entries go.
            namespace: whose they are.
            queue_bytes: how much may wait in host memory to be written.
            sender: tells the scheduler; closed with the saver.
            counts: gets what is counted, and what the store observes.
        """
        self._store = store
        self._namespace = namespace
        self._sender = sender
        self._counts = counts
        self._copies = HostCopies(queue_bytes)
        self._accept = FiniteOnly(counts, "it was encoded here and is not stored")
        self._items: OrderedDict[str, Item] = OrderedDict()
        self._lock = threading.Lock()
        self._outcomes: OrderedDict[str, bool] = OrderedDict()
        self._introduced = False
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
        copied = self._copies.start(tensor)
        if copied is None:
            self._counts.add(drops=1)
        make = functools.partial(self._entry, copied, item) if copied else None
        if make is None or not self._writer.submit(key, tensor.nbytes, make):
            self._remember(key, stored=False)

    def close(self) -> None:
        """Write what waits, for a bounded time."""
        self._writer.close()
        self._copies.close()
        self.tell()
        self._sender.close()

    def tell(self) -> None:
        """Tell the scheduler what became of entries; what it has no room for now goes later.

        Every message names the namespace that entries are written to. The first one is sent even
        where there is nothing else to tell.

        Once in a step: the kernel queues few messages, and the scheduler hears them only between
        steps.
        """
        with self._lock:
            outcomes = dict(islice(self._outcomes.items(), MAX_TOLD))
            counts = self._counts.take()
            observations = self._observations()
            if self._introduced and not outcomes and not counts and not observations:
                return
            message = {
                "namespace": self._namespace,
                "outcomes": outcomes,
                "counts": counts,
                "observations": observations,
            }
            if self._sender.send(message):
                self._introduced = True
                for digest in outcomes:
                    del self._outcomes[digest]
            else:
                self._counts.add(**counts)
                self._observe(observations)

    def _observations(self) -> dict[str, list[float]]:
        """Take what was observed here and by the store, as much as one message takes."""
        self._observe(self._store.counts.take_observations())
        return self._counts.take_observations(MAX_TOLD)

    def _observe(self, observations: Mapping[str, Sequence[float]]) -> None:
        for name, values in observations.items():
            self._counts.observe(name, *values)

    def _entry(self, copied: HostTensor, item: Item) -> Entry | None:
        """Make the entry, on the writer's thread; None where it must not be stored."""
        host = copied()
        data = memoryview(host.view(torch.uint8).reshape(-1).numpy()).cast("B")
        shape = tuple(host.shape)
        entry = Entry(data, DTYPES[host.dtype], shape, item.modality, item.metadata)
        return entry if self._accept(entry) else None

    def _remember(self, key: EntryKey, stored: bool) -> None:
        with self._lock:
            self._outcomes[key.digest] = stored
            while len(self._outcomes) > MAX_ITEMS:
                self._outcomes.popitem(last=False)


class Learner:
    """Tells the scheduler how wide the outputs of this model's encoders are.

    vLLM measures that on producers alone. A consumer that encodes an item itself sees it, too.
    """

    def __init__(self, sender: Sender, counts: Counts) -> None:
        """Know of no item yet.

        Args:
            sender: tells the scheduler; closed with the learner.
            counts: what was counted here, which the scheduler is told, too.
        """
        self._sender = sender
        self._counts = counts
        self._items: OrderedDict[str, str] = OrderedDict()
        self._cache: Mapping[str, torch.Tensor] = {}

    def expect(self, items: Mapping[str, str], encoder_cache: Mapping[str, torch.Tensor]) -> None:
        """Look for items, modality by identifier, in the encoder cache when a step has ended."""
        self._items.update(items)
        self._cache = encoder_cache
        while len(self._items) > MAX_ITEMS:
            self._items.popitem(last=False)

    def tell(self) -> None:
        """Tell the widths of items that are encoded by now; what cannot be sent now goes later.

        One item is enough for a modality: the others are not looked for any longer.
        """
        seen = [identifier for identifier in self._items if identifier in self._cache]
        widths = {self._items[one]: int(self._cache[one].shape[-1]) for one in seen}
        counts = self._counts.take()
        if not widths and not counts:
            return
        if self._sender.send({"widths": widths, "counts": counts}):
            for identifier in [one for one, modality in self._items.items() if modality in widths]:
                del self._items[identifier]
        else:
            self._counts.add(**counts)

    def close(self) -> None:
        """Close the sender."""
        self._sender.close()


def load(loader: Loader, step: StepMetadata, encoder_cache: dict[str, torch.Tensor]) -> None:
    """Put a step's entries into the encoder cache.

    All that can be wrong with an entry was checked before the step: what could still fail here is
    the device itself.
    """
    if step.shared is not None:
        loader.share(step.shared)
    for identifier, item in step.loads.items():
        if identifier not in encoder_cache:
            encoder_cache[identifier] = loader.load(*item)
    if step.shared is not None:
        loader.finish(step.shared.number)


def reader() -> int | None:
    """Return this worker's number among those that load entries; None where it loads none.

    The first pipeline stage alone has the embeddings.
    """
    from vllm.distributed.parallel_state import (  # noqa: PLC0415 - known once workers are up
        get_pcp_group,
        get_pp_group,
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    if not get_pp_group().is_first_rank:
        return None
    contexts = get_pcp_group().rank_in_group * get_tensor_model_parallel_world_size()
    return int(contexts + get_tensor_model_parallel_rank())


def writes() -> bool:
    """Tell whether this worker is the one of those with the same tensors that writes.

    All ranks of a tensor-parallel group and of a prefill-context-parallel group encode every item.
    """
    from vllm.distributed.parallel_state import (  # noqa: PLC0415 - known once workers are up
        get_pcp_group,
        get_tensor_model_parallel_rank,
    )

    return bool(get_tensor_model_parallel_rank() == 0 and get_pcp_group().rank_in_group == 0)
