"""The class that vLLM loads."""

import logging
from typing import Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver

from ec_store.backchannel import Receiver, Sender
from ec_store.base import Store
from ec_store.config import redacted
from ec_store.counts import Counts
from ec_store.fetcher import Fetcher
from ec_store.opening import open_store
from ec_store.vllm_connector.config import ConnectorConfig
from ec_store.vllm_connector.consumer import Consumer
from ec_store.vllm_connector.guard import guarded
from ec_store.vllm_connector.metrics import StoreConnectorStats, StorePromMetrics
from ec_store.vllm_connector.namespace import namespace_of
from ec_store.vllm_connector.producer import Producer, register
from ec_store.vllm_connector.step import Item, Load, StepMetadata
from ec_store.vllm_connector.worker import Saver, load, writes

logger = logging.getLogger("vllm.ec_store")


class ECStoreConnector(ECConnectorBase):
    """The connector; vLLM makes one for the scheduler and one for each worker.

    Attributes:
        namespace: under which this engine's entries are kept.
        counts: what was counted since vLLM last asked.
        logged: names of methods whose exceptions were logged.
    """

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        """Open the store.

        Raises:
            ValueError: the configuration is wrong. This is the one moment where an exception is
                what the operator wants.
            StoreUnavailable: there is no such store.
        """
        super().__init__(vllm_config, role)
        options = vllm_config.ec_transfer_config.ec_connector_extra_config or {}
        config = ConnectorConfig.model_validate(options)
        self.counts = Counts()
        self.logged: set[str] = set()
        self.namespace = namespace_of(vllm_config, config.namespace)
        self._store = open_store(config.store)
        self._corrupt = 0
        self._consumer: Consumer | None = None
        self._producer: Producer | None = None
        self._saver: Saver | None = None
        logger.info("encoder cache in %s, namespace %s", redacted(config.store), self.namespace)
        if role is ECConnectorRole.SCHEDULER:
            self._open_scheduler(vllm_config, config)
        elif self.is_producer and writes():
            sender = Sender(_engine(vllm_config))
            self._saver = Saver(
                self._store, self.namespace, config.queue_bytes, sender, self.counts
            )

    def _open_scheduler(self, vllm_config: Any, config: ConnectorConfig) -> None:
        model_config = vllm_config.model_config
        resolver = PlaceholderMetadataResolver(model_config)
        if self.is_consumer:
            fetcher = Fetcher(
                self._store,
                self.namespace,
                counts=self.counts,
                timeout_s=config.timeout_s,
                promise_timeout_s=config.promise_timeout_s,
                keep_bytes=config.keep_bytes,
            )
            self._consumer = Consumer(fetcher, model_config, resolver, self.counts)
        if self.is_producer:
            receiver = Receiver(_engine(vllm_config))
            self._producer = Producer(self.namespace, resolver, receiver, self.counts)
        register(self._store, model_config.served_model_name, self.namespace)

    def shutdown(self) -> None:
        """Write what waits, for a bounded time, and close."""
        for part in (self._consumer, self._producer, self._saver, self._store):
            if part is not None:
                self._close(part)

    @guarded(lambda: None)
    def _close(self, part: Consumer | Producer | Saver | Store) -> None:
        part.close()

    # Scheduler.

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether all that the request still needs is here or will have to be encoded here."""
        if self._consumer is None:
            return True
        ready = self._ensured(self._consumer, request, num_computed_tokens)
        if ready is None:
            self._consumer.fail(request)
        return bool(ready)

    @guarded(lambda: None)
    def _ensured(self, consumer: Consumer, request: Any, computed: int) -> bool | None:
        return consumer.ensure(request, computed)

    @guarded(set)
    def take_unavailable_requests(self) -> set[str]:
        """Requests that came without media for an entry that is not there: vLLM fails just them."""
        return set() if self._consumer is None else self._consumer.take_unavailable()

    @guarded(lambda: False)
    def has_cache_item(self, identifier: str) -> bool:
        """Whether the entry is in this process's memory, held for a request."""
        return self._consumer is not None and self._consumer.has(identifier)

    @guarded(lambda: None)
    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Load the entry in this step, if it is here."""
        if self._consumer is not None:
            self._consumer.load(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """What the workers load and may have to save in this step."""
        return StepMetadata(self._loads(), self._items(scheduler_output))

    @guarded(dict)
    def _loads(self) -> dict[str, Load]:
        return {} if self._consumer is None else self._consumer.take_loads()

    @guarded(dict)
    def _items(self, scheduler_output: Any) -> dict[str, Item]:
        if self._producer is None:
            return {}
        return self._producer.items(scheduler_output.scheduled_new_reqs)

    @guarded(lambda: (False, None))
    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Let go of what was held for it; a producer tells what it encoded."""
        if self._consumer is not None:
            self._consumer.release(request.request_id)
        return False, None if self._producer is None else self._producer.report(request)

    # Workers.

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **_: Any) -> None:
        """Put this step's entries into the encoder cache."""
        load(self._get_connector_metadata(), encoder_cache)

    @guarded(lambda: None)
    def start_save_caches(self, **kwargs: Any) -> None:
        """Save items of new requests that an earlier step has encoded."""
        if self._saver is not None:
            items = self._get_connector_metadata().items
            self._saver.expect(items, kwargs.get("encoder_cache") or {})

    @guarded(lambda: None)
    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **_: Any) -> None:
        """Save an item that was just encoded."""
        if self._saver is not None:
            self._saver.save(mm_hash, encoder_cache[mm_hash])

    @guarded(lambda: None)
    def build_connector_worker_meta(self) -> None:
        """End of a step: tell the scheduler beside vLLM's own way, see `ec_store.backchannel`."""
        if self._saver is not None:
            self._saver.tell()

    # Figures.

    @guarded(lambda: None)
    def get_ec_connector_stats(self) -> StoreConnectorStats | None:
        """What was counted since the last call; workers tell their scheduler."""
        if self.role is not ECConnectorRole.SCHEDULER:
            return None
        if self._producer is not None:
            self._producer.listen()
        corrupt = self._store.counts["corrupt"]
        if corrupt > self._corrupt:
            self.counts.add(corrupt=corrupt - self._corrupt)
            self._corrupt = corrupt
        counts = self.counts.take()
        return StoreConnectorStats(counts) if counts else None

    @classmethod
    def build_ec_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> StoreConnectorStats | None:
        """Figures as vLLM's logger gets them."""
        return StoreConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> StorePromMetrics:
        """Figures on vLLM's `/metrics`."""
        return StorePromMetrics(*args, **kwargs)


def _engine(vllm_config: Any) -> str:
    """A name of this engine: data-parallel engines share their transfer configuration."""
    rank = vllm_config.parallel_config.data_parallel_index
    return f"{vllm_config.ec_transfer_config.engine_id}/{rank}"
