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
from ec_store.device.loads import Loader
from ec_store.device.region import Shared
from ec_store.fetcher import Fetcher
from ec_store.opening import fetch_threads, open_store
from ec_store.vllm_connector.config import ConnectorConfig
from ec_store.vllm_connector.consumer import Consumer
from ec_store.vllm_connector.fit import Widths
from ec_store.vllm_connector.guard import caught, guarded
from ec_store.vllm_connector.metrics import NAMESPACE, StoreConnectorStats, StorePromMetrics
from ec_store.vllm_connector.namespace import namespace_of
from ec_store.vllm_connector.producer import Producer
from ec_store.vllm_connector.registration import Registration
from ec_store.vllm_connector.sharing import Sharing, by_value, make_region
from ec_store.vllm_connector.step import Item, Load, StepMetadata
from ec_store.vllm_connector.worker import Learner, Saver, load, reader, writes

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
                what the operator wants. A store that cannot be reached is none: it is opened by the
                first use, and again after each failure.
        """
        super().__init__(vllm_config, role)
        options = vllm_config.ec_transfer_config.ec_connector_extra_config or {}
        config = ConnectorConfig.model_validate(options)
        self.counts = Counts()
        self.logged: set[str] = set()
        self.namespace = namespace_of(vllm_config, config.generation)
        self._store = open_store(config.store, lazy=True)
        self._corrupt = 0
        self._gauges: dict[str, float] = {}
        self._fetcher: Fetcher | None = None
        self._consumer: Consumer | None = None
        self._producer: Producer | None = None
        self._saver: Saver | None = None
        self._learner: Learner | None = None
        self._loader: Loader | None = None
        self._sharing: Sharing | None = None
        self._receiver: Receiver | None = None
        self._registration: Registration | None = None
        logger.info("encoder cache in %s, namespace %s", redacted(config.store), self.namespace)
        if role is ECConnectorRole.SCHEDULER:
            self._open_scheduler(vllm_config, config)
        else:
            self._open_worker(_engine(vllm_config), config)

    def _open_scheduler(self, vllm_config: Any, config: ConnectorConfig) -> None:
        model_config = vllm_config.model_config
        resolver = PlaceholderMetadataResolver(model_config)
        if self.is_consumer:
            size = config.memory_bytes if config.region_bytes is None else config.region_bytes
            self._sharing = Sharing(self._store, make_region(size, vllm_config.parallel_config))
            self._fetcher = Fetcher(
                self._sharing,
                self.namespace,
                counts=self.counts,
                timeout_s=config.timeout_s,
                promise_timeout_s=config.promise_timeout_s,
                memory_bytes=config.memory_bytes,
                threads=config.fetch_threads or fetch_threads(config.store),
            )
            widths = Widths(vllm_config, config.encoder_output_widths)
            self._consumer = Consumer(self._fetcher, model_config, resolver, widths, self.counts)
        if self.is_producer:
            self._producer = Producer(self.namespace, resolver)
        self._receiver = Receiver(_engine(vllm_config))
        self._registration = Registration(
            self._store, model_config.served_model_name, self.namespace
        )

    def _open_worker(self, engine: str, config: ConnectorConfig) -> None:
        number = reader() if self.is_consumer else None
        if number is not None:
            self._loader = Loader(number)
        if not writes():
            return
        if self.is_producer:
            sender = Sender(engine)
            self._saver = Saver(
                self._store, self.namespace, config.queue_bytes, sender, self.counts
            )
        if self.is_consumer:
            self._learner = Learner(Sender(engine), self.counts)

    def shutdown(self) -> None:
        """Write what waits, for a bounded time, and close."""
        for part in (
            self._registration,
            self._consumer,
            self._sharing,
            self._receiver,
            self._saver,
            self._learner,
            self._store,
        ):
            if part is not None:
                self._close(part)

    @guarded(lambda: None)
    def _close(
        self, part: Registration | Consumer | Sharing | Receiver | Saver | Learner | Store
    ) -> None:
        part.close()

    # Scheduler.

    @guarded(lambda: False)
    def ensure_cache_available(
        self, request: Any, num_computed_tokens: int = 0, *_args: Any, **_kwargs: Any
    ) -> bool:
        """Whether all that the request still needs is here or will have to be encoded here.

        Where this raises, the request encodes its media here; without media it fails alone. Other
        releases of vLLM may pass more arguments.
        """
        if self._consumer is None:
            return True
        try:  # not `guarded`: each step calls this for each request that waits
            return self._consumer.ensure(request, num_computed_tokens)
        except Exception as error:  # noqa: BLE001 - as in `guarded`
            caught(self, "ensure_cache_available", error)
        ready = self._encoded_here(self._consumer, request, num_computed_tokens)
        if ready is None:
            self._consumer.fail(request)
        return bool(ready)

    @guarded(lambda: None)
    def _encoded_here(self, consumer: Consumer, request: Any, computed: int) -> bool | None:
        return consumer.encode_here(request, computed)

    @guarded(set)
    def take_unavailable_requests(self, *_: Any, **__: Any) -> set[str]:
        """Requests that came without media for an entry that is not there: vLLM fails just them."""
        return set() if self._consumer is None else self._consumer.take_unavailable()

    @guarded(lambda: False)
    def has_cache_item(self, identifier: str, *_: Any, **__: Any) -> bool:
        """Whether the entry is in this process's memory, held for a request."""
        return self._consumer is not None and self._consumer.has(identifier)

    @guarded(lambda: None)
    def update_state_after_alloc(self, request: Any, index: int, *_: Any, **__: Any) -> None:
        """Load the entry in this step, if it is here."""
        if self._consumer is not None:
            self._consumer.load(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: Any, *_: Any, **__: Any) -> StepMetadata:
        """What the workers load and may have to save in this step."""
        return StepMetadata(
            self._loads(), self._items(scheduler_output), self._learn(), self._shared()
        )

    @guarded(dict)
    def _learn(self) -> dict[str, str]:
        return {} if self._consumer is None else self._consumer.take_learn()

    @guarded(dict)
    def _loads(self) -> dict[str, Load]:
        if self._consumer is None or self._sharing is None:
            return {}
        self._consumer.end_step()
        entries = self._consumer.take_loads()
        try:
            return self._sharing.loads(entries)
        except Exception as error:  # noqa: BLE001 - without its entries a step ends the engine
            caught(self, "_loads", error)
        return by_value(entries)

    @guarded(lambda: None)
    def _shared(self) -> Shared | None:
        """Return what the step says of the shared memory.

        Without it workers read what is there, and tell that they have in a later step.
        """
        return None if self._sharing is None else self._sharing.shared()

    @guarded(dict)
    def _items(self, scheduler_output: Any) -> dict[str, Item]:
        if self._producer is None:
            return {}
        return self._producer.items(scheduler_output.scheduled_new_reqs)

    @guarded(lambda: (False, None))
    def request_finished(
        self, request: Any, *_: Any, **__: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let go of what was held for it; a producer tells what it encoded."""
        if self._consumer is not None:
            self._consumer.release(request.request_id)
        if self._producer is None:
            return False, None
        self._listen()
        return False, self._producer.report(request)

    def _listen(self) -> None:
        """Hear what the workers tell."""
        for message in self._receiver.drain() if self._receiver is not None else ():
            self.counts.add(**message.get("counts", {}))
            for name, values in message.get("observations", {}).items():
                self.counts.observe(name, *values)
            for part in (self._consumer, self._producer):
                if part is not None:
                    part.hear(message)

    # Workers.

    @guarded(lambda: None)
    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], *_: Any, **__: Any) -> None:
        """Put this step's entries into the encoder cache.

        What cannot be put there is missed by vLLM itself in this step, which ends the engine: no
        other value of the right shape would give the right answer. The scheduler's side has checked
        the entries, so what is left is the device's failure.
        """
        step = self._get_connector_metadata()
        if self._loader is not None:
            load(self._loader, step, encoder_cache)
        if self._learner is not None:
            self._learner.expect(step.learn, encoder_cache)

    @guarded(lambda: None)
    def start_save_caches(self, *_: Any, **kwargs: Any) -> None:
        """Save items of new requests that an earlier step has encoded."""
        if self._saver is not None:
            items = self._get_connector_metadata().items
            self._saver.expect(items, kwargs.get("encoder_cache") or {})

    @guarded(lambda: None)
    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, *_: Any, **__: Any
    ) -> None:
        """Save an item that was just encoded."""
        if self._saver is not None:
            self._saver.save(mm_hash, encoder_cache[mm_hash])

    @guarded(lambda: None)
    def build_connector_worker_meta(self, *_: Any, **__: Any) -> None:
        """End of a step: tell the scheduler beside vLLM's own way, see `ec_store.backchannel`."""
        if self._loader is not None:
            self._loader.poll()
        for part in (self._saver, self._learner):
            if part is not None:
                part.tell()

    # Figures.

    @guarded(lambda: None)
    def get_ec_connector_stats(self, *_: Any, **__: Any) -> StoreConnectorStats | None:
        """What was counted since the last call, and how it is now; workers tell their scheduler."""
        if self.role is not ECConnectorRole.SCHEDULER:
            return None
        self._listen()
        corrupt = self._store.counts["corrupt"]
        if corrupt > self._corrupt:
            self.counts.add(corrupt=corrupt - self._corrupt)
            self._corrupt = corrupt
        figures: dict[str, Any] = {**self.counts.take(), **self.counts.take_observations()}
        if self._fetcher is not None:
            gauges = self._fetcher.gauges()
            if gauges != self._gauges:
                self._gauges = gauges
                figures |= gauges
        return StoreConnectorStats(figures | {NAMESPACE: self.namespace}) if figures else None

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
