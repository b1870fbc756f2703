"""The scheduler's side of a producer: what is encoded, and what may be said of it."""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.utils import (
    PlaceholderMetadataResolver,
    collect_ec_item_metadata,
)

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
    ) -> None:
        """Know of nothing yet.

        Args:
            namespace: whose entries they are.
            resolver: vLLM's, of the model.
        """
        self._namespace = namespace
        self._resolver = resolver
        self._lost: OrderedDict[str, None] = OrderedDict()
        self._written_to: str | None = None

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
        """What a finished request's reply names: items that are stored, or on their way.

        Nothing where the workers write to another namespace: a consumer would wait for entries that
        never come.
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

    def hear(self, message: dict[str, Any]) -> None:
        """Take what a worker tells: where it writes to, and what it could not store."""
        self._compare(message.get("namespace"))
        for digest, stored in message.get("outcomes", {}).items():
            self._lost.pop(digest, None)
            if not stored:
                self._lost[digest] = None
        while len(self._lost) > MAX_LOST:
            self._lost.popitem(last=False)

    def _compare(self, written_to: str | None) -> None:
        """Log an error where a worker writes to another namespace than this engine reads."""
        if written_to in {None, self._namespace, self._written_to}:
            return
        self._written_to = written_to
        logger.error(
            "this engine derives two namespaces: its worker writes encoder outputs to %s, its "
            "scheduler names and reads %s. Nothing it encodes is found, so its replies name no "
            "entries and media are sent to prefill and decode. Make sure that all of its hosts "
            "have the same vLLM, the same ec_store and the same files of the model; "
            "if they have, report the model's architecture with both names.",
            written_to,
            self._namespace,
        )
