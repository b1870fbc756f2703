"""`ECStoreConnector`, the class that vLLM loads."""

import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver

from ec_store.arena.protocol import Role
from ec_store.arena.store import ArenaStore
from ec_store.arena.url import arena_options
from ec_store.backends import find_backend
from ec_store.base import Store
from ec_store.config import redacted
from ec_store.counts import Counts
from ec_store.engine.backchannel import Receiver, Sender
from ec_store.engine.fetcher import Fetcher
from ec_store.engine.host_memory import HostMemory, HostUsage, host_gauges, usage_of
from ec_store.engine.registration import NamespaceRegistration
from ec_store.engine.sharing import EntryLoad, Sharing, make_loads, open_sharing
from ec_store.engine.tensors import Loader
from ec_store.opening import open_store
from ec_store.vllm_connector.config import ConnectorConfig
from ec_store.vllm_connector.consumer import Consumer
from ec_store.vllm_connector.guard import count_exception, guard_method
from ec_store.vllm_connector.media_cache import keep_media
from ec_store.vllm_connector.metrics import NAMESPACE, StoreConnectorStats, StorePromMetrics
from ec_store.vllm_connector.namespace import namespace_of
from ec_store.vllm_connector.producer import Producer
from ec_store.vllm_connector.widths import Widths
from ec_store.vllm_connector.worker import (
    Item,
    Learner,
    Saver,
    StepMetadata,
    is_writer,
    load,
    reader,
)

HOST_WAIT_S = 0.002
"""Upper bound of the time in seconds that a step waits for lookups in a host's memory.

Such a lookup takes some tenths of a millisecond. A request with an unfinished lookup is scheduled
in the next step at the earliest: its first token is later by a whole step, and it is not prefilled
together with requests that came at the same time."""

logger = logging.getLogger("vllm.ec_store")

P = ParamSpec("P")
T = TypeVar("T")


class ECStoreConnector(ECConnectorBase):
    """Connector; vLLM creates one for the scheduler and one for each worker.

    Attributes:
        namespace: namespace of this engine's entries.
        counts: counts since vLLM last read them.
        logged: names of the methods that have logged an exception.
    """

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        """Create the connector for one role.

        Raises:
            ValueError: the configuration is invalid. Only here may an exception end the engine. An
                unreachable store raises nothing: the first use opens it, and the next use after
                each failure opens it again.
        """
        super().__init__(vllm_config, role)
        options = vllm_config.ec_transfer_config.ec_connector_extra_config or {}
        config = ConnectorConfig.model_validate(options)
        self.counts = Counts()
        self.logged: set[str] = set()
        self.namespace = namespace_of(vllm_config, config.generation)
        self._store = self._open_store(config.store)
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
        self._registration: NamespaceRegistration | None = None
        self._host: HostMemory | None = None
        self._usages: dict[str, HostUsage] = {}
        logger.info("encoder store in %s, namespace %s", redacted(config.store), self.namespace)
        if role is ECConnectorRole.SCHEDULER:
            self._open_scheduler(vllm_config, config)
        else:
            self._open_worker(_engine(vllm_config), config)

    def _open_store(self, url: str) -> Store:
        """Open the store, with the least rights that this process needs in a host's memory."""
        if urlsplit(url).scheme != "shm":
            return open_store(url, lazy=True)
        role: Role = "reader"
        if self.role is ECConnectorRole.SCHEDULER:
            role = "reader" if self.is_consumer else "proxy"
        elif self.is_producer and is_writer():
            role = "writer"
        return ArenaStore(arena_options(url), role)

    def _open_scheduler(self, vllm_config: Any, config: ConnectorConfig) -> None:
        model_config = vllm_config.model_config
        resolver = PlaceholderMetadataResolver(model_config)
        if self.is_consumer:
            size = config.memory_bytes if config.region_bytes is None else config.region_bytes
            self._sharing = open_sharing(self._store, size, vllm_config.parallel_config)
            self._fetcher = Fetcher(
                self._sharing,
                self.namespace,
                counts=self.counts,
                timeout_s=config.timeout_s,
                promise_timeout_s=config.promise_timeout_s,
                memory_bytes=config.memory_bytes,
                threads=config.fetch_threads or find_backend(config.store).fetch_threads,
                # An entry of a host's memory that is kept could not be evicted.
                keeps=not isinstance(self._store, ArenaStore),
                wait_s=HOST_WAIT_S if isinstance(self._store, ArenaStore) else 0.0,
            )
            widths = Widths(vllm_config, config.encoder_output_widths)
            self._consumer = Consumer(self._fetcher, model_config, resolver, widths, self.counts)
            keep_media(self._consumer.placeholder_fields)
        if self.is_producer:
            self._producer = Producer(self.namespace, resolver)
        self._receiver = Receiver(_engine(vllm_config))
        self._registration = NamespaceRegistration(
            self._store, model_config.served_model_name, self.namespace
        )

    def _open_worker(self, engine: str, config: ConnectorConfig) -> None:
        if self.is_consumer and (number := reader()) is not None:
            self._loader = Loader(number)
        if self.is_consumer and is_writer():
            self._learner = Learner(Sender(engine), self.counts)
        if self.is_producer and is_writer():
            self._saver = Saver(
                self._store, self.namespace, config.queue_bytes, Sender(engine), self.counts
            )
        if isinstance(self._store, ArenaStore) and (self._loader or self._saver):
            self._host = HostMemory(self._store, self._loader, Sender(engine))

    def shutdown(self) -> None:
        """Write the queued entries, for a bounded time, and close all parts."""
        for part in (
            self._registration,
            self._consumer,
            self._sharing,
            self._host,
            self._receiver,
            self._saver,
            self._learner,
            self._store,
        ):
            if part is not None:
                self._attempt(part.close)

    def _attempt(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Make a call that nothing else depends on, so that its failure stops nothing else.

        Every call that may start a thread or use the device, and that a step can miss, is one.
        Return None if the call raises.
        """
        try:
            return call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - as in `guard_method`
            count_exception(self, call.__qualname__, error)
            return None

    # Methods of the scheduler's side.

    @guard_method(lambda: False)
    def ensure_cache_available(
        self, request: Any, num_computed_tokens: int = 0, *_args: Any, **_kwargs: Any
    ) -> bool:
        """Return whether each item that the request needs is here or will be encoded here.

        If the check raises, the request encodes its media here; a request without media fails, and
        no other request. Other releases of vLLM may pass more arguments.
        """
        if self._consumer is None:
            return True
        try:  # not `guard_method`: runs in each step for each waiting request
            return self._consumer.ensure_items(request, num_computed_tokens)
        except Exception as error:  # noqa: BLE001 - as in `guard_method`
            count_exception(self, "ensure_cache_available", error)
        ready = self._attempt(self._consumer.encode_here, request, num_computed_tokens)
        if ready is None:
            self._consumer.fail(request)
        return bool(ready)

    @guard_method(set)
    def take_unavailable_requests(self, *_: Any, **__: Any) -> set[str]:
        """Return requests without media and without an entry: vLLM fails only these."""
        return set() if self._consumer is None else self._consumer.take_unavailable()

    @guard_method(lambda: False)
    def has_cache_item(self, identifier: str, *_: Any, **__: Any) -> bool:
        """Return whether the entry is in this process's memory, held for a request."""
        return self._consumer is not None and self._consumer.has(identifier)

    @guard_method(lambda: None)
    def update_state_after_alloc(self, request: Any, index: int, *_: Any, **__: Any) -> None:
        """Load the entry in this step, if it is held."""
        if self._consumer is not None:
            self._consumer.load(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: Any, *_: Any, **__: Any) -> StepMetadata:
        """Return the entries to load and the items to save in this step, for the workers."""
        if self._registration is not None:
            self._attempt(self._registration.start)
        if self._sharing is not None:
            self._attempt(self._sharing.start)
        return StepMetadata(
            self._attempt(self._loads) or {},
            self._attempt(self._items, scheduler_output) or {},
            (self._consumer and self._attempt(self._consumer.take_learn)) or {},
            # Without it workers still read their entries, and report them in a later step.
            self._sharing and self._attempt(self._sharing.shared_region),
            bool(getattr(scheduler_output, "scheduled_encoder_inputs", None)),
        )

    def _loads(self) -> dict[str, EntryLoad]:
        if self._consumer is None or self._sharing is None:
            return {}
        entries = self._consumer.end_step()
        loads = self._attempt(self._sharing.loads, entries)
        # A step without its entries ends the engine.
        return make_loads(entries) if loads is None else loads

    def _items(self, scheduler_output: Any) -> dict[str, Item]:
        producer = self._producer
        return {} if producer is None else producer.items(scheduler_output.scheduled_new_reqs)

    @guard_method(lambda: (False, None))
    def request_finished(
        self, request: Any, *_: Any, **__: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Release the request's entries; a producer returns the items that it encoded.

        What it returns becomes part of the answer. An engine that also consumes entries answers
        clients too, which have no use for keys of the store: it names them only if one token was
        requested, as encode and prefill requests do.
        """
        if self._consumer is not None:
            self._consumer.release(request.request_id)
        if self._producer is None:
            return False, None
        self._process_messages()
        if self._consumer is not None and request.max_tokens > 1:
            return False, None
        return False, self._producer.report(request)

    def _process_messages(self) -> None:
        for message in self._receiver.drain() if self._receiver is not None else ():
            self.counts.add(**message.get("counts", {}))
            for name, values in message.get("observations", {}).items():
                self.counts.observe(name, *values)
            for process, usage in message.get("host", {}).items():
                self._usages[process] = HostUsage(*usage)
            for part in (self._consumer, self._producer):
                if part is not None:
                    part.handle_message(message)

    # Methods of the workers' side.

    @guard_method(lambda: None)
    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], *_: Any, **__: Any) -> None:
        """Put this step's entries into the encoder cache.

        If an entry cannot be put there, vLLM misses it in this step, which ends the engine: no
        other value of the right shape would give the right answer. The scheduler's side has checked
        the entries, so only a failure of the device remains.
        """
        step, loader = self._get_connector_metadata(), self._loader
        if loader is not None:
            self._attempt(load, loader, step, encoder_cache, self._host)
            if step.shared is not None:
                self._attempt(loader.map_shared, step.shared)
                self._attempt(loader.finish, step.shared.number)
        if self._host is not None:
            self._attempt(self._host.start)
        if self._learner is not None:
            self._attempt(self._learner.expect_items, step.learn, encoder_cache)

    @guard_method(lambda: None)
    def start_save_caches(self, *_: Any, **kwargs: Any) -> None:
        """Save items of new requests that an earlier step has encoded."""
        if self._host is not None:
            self._attempt(self._host.start)
        if self._saver is not None:
            step = self._get_connector_metadata()
            self._saver.expect_items(step.items, kwargs.get("encoder_cache") or {})
            if step.encodes:
                self._attempt(self._saver.timer.begin_step)

    @guard_method(lambda: None)
    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, *_: Any, **__: Any
    ) -> None:
        """Save an item that was just encoded."""
        if self._saver is not None:
            self._saver.save_encoded(mm_hash, encoder_cache[mm_hash])

    @guard_method(lambda: None)
    def build_connector_worker_meta(self, *_: Any, **__: Any) -> None:
        """Send the step's results to the scheduler at its end (`ec_store.engine.backchannel`)."""
        if self._loader is not None:
            self._attempt(self._loader.report_copies)
        if self._saver is not None:
            self._attempt(self._saver.timer.end_step)
        for part in (self._saver, self._learner):
            if part is not None:
                self._attempt(part.send_reports)

    # Metrics.

    @guard_method(lambda: None)
    def get_ec_connector_stats(self, *_: Any, **__: Any) -> StoreConnectorStats | None:
        """Return counts since the last call, and gauges; workers send theirs to the scheduler."""
        if self.role is not ECConnectorRole.SCHEDULER:
            return None
        self._process_messages()
        corrupt = self._store.counts["corrupt"]
        if corrupt > self._corrupt:
            self.counts.add(corrupt=corrupt - self._corrupt)
            self._corrupt = corrupt
        figures: dict[str, Any] = {**self.counts.take_counts(), **self.counts.take_observations()}
        gauges = {} if self._fetcher is None else self._fetcher.gauges()
        if isinstance(self._store, ArenaStore):
            gauges |= host_gauges([*self._usages.values(), usage_of(self._store.connection)])
        if gauges != self._gauges:
            self._gauges = gauges
            figures |= gauges
        return StoreConnectorStats(figures | {NAMESPACE: self.namespace}) if figures else None

    @classmethod
    def build_ec_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> StoreConnectorStats | None:
        return StoreConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> StorePromMetrics:
        return StorePromMetrics(*args, **kwargs)


def _engine(vllm_config: Any) -> str:
    """Return a name of this engine: data-parallel engines share their transfer configuration."""
    rank = vllm_config.parallel_config.data_parallel_index
    return f"{vllm_config.ec_transfer_config.engine_id}/{rank}"
