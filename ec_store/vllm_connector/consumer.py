"""The scheduler's side of a consumer: nothing here touches a disk or a network."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver

from ec_store.counts import Counts
from ec_store.entry import Entry
from ec_store.fetcher import Fetcher, State
from ec_store.vllm_connector.step import Load
from ec_store.vllm_connector.tensors import DTYPES

MODALITIES = ("image", "audio", "video")

Item = tuple[str, int]
"""An identifier, and how many tokens the item has."""


@dataclass(slots=True)
class _Needs:
    """What a request waits for.

    Items are told apart by their identifier and their number of tokens: a client may give two
    pictures one name.

    Attributes:
        preemptions: how often it had been preempted when it was last asked for.
        waiting: identifiers of entries that are on their way.
        pinned: items whose entry is held in memory for it.
        local: items that it encodes here, unless another request has their entry by then.
    """

    preemptions: int
    waiting: set[str] = field(default_factory=set)
    pinned: set[Item] = field(default_factory=set)
    local: set[Item] = field(default_factory=set)


class Consumer:
    """Has entries in memory before the steps that need them.

    vLLM asks for an item by its identifier alone, and an entry with too few or too many tokens ends
    the engine. So no two requests may be settled on one identifier with another number of tokens
    once its entry is pinned: the later one fails, or encodes and pins nothing.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        model_config: Any,
        resolver: PlaceholderMetadataResolver,
        counts: Counts,
    ) -> None:
        """Fetch nothing yet.

        Args:
            fetcher: fetches entries.
            model_config: vLLM's.
            resolver: vLLM's, of the model.
            counts: gets `misfits` and `failed_requests`.
        """
        self._fetcher = fetcher
        self._dtype = DTYPES[model_config.dtype]
        # Building a processor takes its time: now rather than in a step.
        self._fields = {modality: resolver.fields_for(modality) for modality in MODALITIES}
        self._counts = counts
        self._requests: dict[str, _Needs] = {}
        self._unavailable: set[str] = set()
        self._loads: dict[str, Entry] = {}

    def ensure(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether all that a request still needs is here or will have to be encoded here."""
        needs = self._needs(request)
        ready = True
        for feature in request.mm_features:
            if request.request_id in self._unavailable:
                return False
            position = feature.mm_position
            if position.offset + position.length > num_computed_tokens:
                ready &= self._settled(request, needs, feature)
            else:
                needs.local.discard(_item(feature))
        return ready

    def fail(self, request: Any) -> None:
        """Have vLLM fail this one request."""
        if request.request_id not in self._unavailable:
            self._counts.add(failed_requests=1)
            self._unavailable.add(request.request_id)

    def take_unavailable(self) -> set[str]:
        """Requests without media whose entry is not there."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    def has(self, identifier: str) -> bool:
        """Whether an entry is held for a request."""
        return self._fetcher.is_pinned(identifier)

    def load(self, identifier: str) -> None:
        """Have the next step load an entry, if it is held for a request."""
        entry = self._fetcher.entry(identifier)
        if entry is not None and self.has(identifier):
            self._loads[identifier] = entry

    def take_loads(self) -> dict[str, Load]:
        """What the next step loads."""
        taken, self._loads = self._loads, {}
        return {
            identifier: Load(np.frombuffer(entry.data, dtype=np.uint8), entry.dtype, entry.shape)
            for identifier, entry in taken.items()
        }

    def release(self, request_id: str) -> None:
        """Let go of what was held for a request."""
        needs = self._requests.pop(request_id, None)
        if needs is None:
            return
        for identifier, _ in needs.pinned:
            self._fetcher.unpin(identifier)
        for identifier in needs.waiting:
            if not any(identifier in other.waiting for other in self._requests.values()):
                self._fetcher.drop(identifier)

    def close(self) -> None:
        """Fetch no more."""
        self._fetcher.close()

    def _needs(self, request: Any) -> _Needs:
        fresh = _Needs(request.num_preemptions)
        needs = self._requests.setdefault(request.request_id, fresh)
        if needs.preemptions != request.num_preemptions:
            # It may have lost what was encoded for it, and the store may have it by now.
            needs.preemptions = request.num_preemptions
            needs.local.clear()
        return needs

    def _settled(self, request: Any, needs: _Needs, feature: Any) -> bool:
        item = identifier, _ = _item(feature)
        if item in needs.pinned or item in needs.local:
            return True
        promised = identifier in (request.ec_transfer_params or {})
        state = self._fetcher.poll(identifier, promised=promised)
        if state is State.PENDING:
            needs.waiting.add(identifier)
            return False
        needs.waiting.discard(identifier)
        entry = self._fetcher.entry(identifier)
        if state is State.READY and entry is not None and self._fits(entry, item):
            self._fetcher.pin(identifier)
            needs.pinned.add(item)
        elif self._fetcher.is_pinned(identifier) or not self._has_media(feature):
            self.fail(request)
            return False
        else:
            needs.local.add(item)
        return True

    def _fits(self, entry: Entry, item: Item) -> bool:
        """Whether an entry is of this item, and of all that vLLM may give it to."""
        identifier, tokens = item
        fits = (
            entry.dtype == self._dtype
            and len(entry.shape) == 2  # noqa: PLR2004 - (tokens, width)
            and entry.shape[0] == tokens
            and not any(
                name == identifier and others != tokens
                for needs in self._requests.values()
                for name, others in needs.local
            )
        )
        if not fits:
            self._counts.add(misfits=1)
        return fits

    def _has_media(self, feature: Any) -> bool:
        """Whether this engine could encode the item itself."""
        if feature.data is None:
            return False
        placeholder = self._fields.get(feature.modality, set())
        data = feature.data.get_data()
        return any(value is not None and key not in placeholder for key, value in data.items())


def _item(feature: Any) -> Item:
    return feature.identifier, feature.mm_position.get_num_embeds()
