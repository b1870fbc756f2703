"""The scheduler's side of a producer: what is encoded, and what may be said of it."""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.utils import (
    PlaceholderMetadataResolver,
    collect_ec_item_metadata,
)

from ec_store.backchannel import Receiver
from ec_store.base import Store
from ec_store.counts import Counts
from ec_store.errors import StoreError
from ec_store.keys import key_or_none
from ec_store.vllm_connector.step import Item

logger = logging.getLogger("vllm.ec_store")

MAX_LOST = 4096
"""How many entries that were not written are remembered, by digest."""


class Producer:
    """Tells workers what they encode, and clients of the engine what they may load."""

    def __init__(
        self,
        namespace: str,
        resolver: PlaceholderMetadataResolver,
        receiver: Receiver,
        counts: Counts,
    ) -> None:
        """Know of nothing yet.

        Args:
            namespace: whose entries they are.
            resolver: vLLM's, of the model.
            receiver: hears from the workers; closed with the producer.
            counts: gets what is counted.
        """
        self._namespace = namespace
        self._resolver = resolver
        self._receiver = receiver
        self._counts = counts
        self._lost: OrderedDict[str, None] = OrderedDict()

    def items(self, new_requests: Sequence[Any]) -> dict[str, Item]:
        """What new requests bring."""
        items = {}
        for request in new_requests:
            modalities = {one.identifier: one.modality for one in request.mm_features}
            reported = collect_ec_item_metadata(request.mm_features, self._resolver)
            for identifier, item in reported.items():
                items[identifier] = Item(modalities[identifier], item["metadata"])
        return items

    def report(self, request: Any) -> dict[str, Any] | None:
        """What a finished request's reply names: items that are stored, or on their way."""
        self.listen()
        items = {
            identifier: {**item, "namespace": self._namespace}
            for identifier, item in collect_ec_item_metadata(
                request.mm_features, self._resolver
            ).items()
            if (key := key_or_none(self._namespace, identifier)) and key.digest not in self._lost
        }
        return items or None

    def close(self) -> None:
        """Hear no more."""
        self._receiver.close()

    def listen(self) -> None:
        """Hear what the workers have counted, and what they could not store."""
        for message in self._receiver.drain():
            self._counts.add(**message.get("counts", {}))
            for digest, stored in message.get("outcomes", {}).items():
                self._lost.pop(digest, None)
                if not stored:
                    self._lost[digest] = None
        while len(self._lost) > MAX_LOST:
            self._lost.popitem(last=False)


def register(store: Store, model: str, namespace: str) -> None:
    """Say in the store under which namespace a served model's entries are kept.

    A store that is away is no reason not to serve: a proxy that asks finds no namespace, and sends
    media.
    """
    try:
        known = store.namespaces().get(model)
        if known not in {None, namespace}:
            logger.warning(
                "%s was served from namespace %s: another model, revision, dtype or configuration "
                "has used this store. Nothing is shared with it.",
                model,
                known,
            )
        store.register_namespace(model, namespace)
    except StoreError as error:
        logger.warning("the namespace could not be registered: %s", error)
