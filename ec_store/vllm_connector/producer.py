"""Scheduler's side of a producer."""

import logging
from collections.abc import Sequence
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.utils import (
    PlaceholderMetadataResolver,
    collect_ec_item_metadata,
)

from ec_store.bounded import BoundedDict
from ec_store.keys import key_or_none
from ec_store.vllm_connector.worker import Item

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
