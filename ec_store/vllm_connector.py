"""`ECStoreConnector`: vLLM's encoder cache on any store of this package.

    --ec-transfer-config '{"ec_connector": "ECStoreConnector",
        "ec_connector_module_path": "ec_store.vllm_connector", "ec_role": "ec_producer",
        "ec_connector_extra_config": {"store": "file:///dev/shm/ec?max_bytes=8GiB"}}'

Roles: `ec_producer`, `ec_consumer`, `ec_both`. The interface is
`vllm/distributed/ec_transfer/ec_connector/base.py` of vLLM 0.32 and 0.33.

The rule: no fault of the store ends a request that could be served without it, and none ends an
engine. The scheduler's side touches no disk and no network: entries are fetched on threads while
their requests wait, and are in this process's memory before a step depends on them. They reach the
workers with the step's metadata.
"""

import functools
import hashlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
import orjson
import torch
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)
from vllm.distributed.ec_transfer.ec_connector.metrics import (
    ECConnectorPromMetrics,
    ECConnectorStats,
)
from vllm.distributed.ec_transfer.ec_connector.utils import (
    PlaceholderMetadataResolver,
    collect_ec_item_metadata,
)

from ec_store.config import redacted
from ec_store.entry import FORMAT, Entry
from ec_store.fetcher import Fetcher, State
from ec_store.keys import EntryKey
from ec_store.opening import open_store
from ec_store.writer import Writer

logger = logging.getLogger("vllm.ec_store")

DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
MODALITIES = ("image", "audio", "video")
MAX_DESCRIPTIONS = 4096
"""How many items' metadata a worker remembers until they are encoded."""

OPTIONS = frozenset(
    {"store", "namespace", "timeout_s", "promise_timeout_s", "keep_bytes", "queue_length"}
)

T = TypeVar("T")


@dataclass
class StepMetadata(ECConnectorMetadata):
    """What the workers need for one step.

    Attributes:
        loads: entries to put into the encoder cache: (bytes, dtype, shape) by identifier.
        items: modality and placeholder metadata of items that new requests bring.
    """

    loads: dict[str, tuple[np.ndarray[Any, Any], str, tuple[int, ...]]] = field(
        default_factory=dict
    )
    items: dict[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)


@dataclass
class WorkerCounts(ECConnectorWorkerMetadata):
    """What the workers have counted since the last step."""

    counts: Counter[str]

    def aggregate(self, other: ECConnectorWorkerMetadata) -> "WorkerCounts":
        """The sum of both."""
        assert isinstance(other, WorkerCounts)  # noqa: S101 - vLLM aggregates one class
        return WorkerCounts(self.counts + other.counts)


def guarded(default: Callable[[], Any]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Keep a method's exceptions out of the engine, which would end with them.

    They are counted, and logged in full the first time each method raises one.
    """

    def wrap(method: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(method)
        def call(self: "ECStoreConnector", *args: Any, **kwargs: Any) -> T:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                self.counts["exceptions"] += 1
                if method.__name__ not in self.logged:
                    self.logged.add(method.__name__)
                    logger.exception("%s failed; the engine goes on without", method.__name__)
                return cast("T", default())

        return call

    return wrap


class ECStoreConnector(ECConnectorBase):
    """The connector; vLLM makes one for the scheduler and one for each worker."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        """Open the store.

        Raises:
            ValueError: the configuration is wrong. This is the one moment where an exception is
                what the operator wants.
            StoreUnavailable: there is no such store.
        """
        super().__init__(vllm_config, role)
        options = dict(vllm_config.ec_transfer_config.ec_connector_extra_config or {})
        if unknown := options.keys() - OPTIONS:
            raise ValueError(f"unknown in ec_connector_extra_config: {', '.join(sorted(unknown))}")
        if "store" not in options:
            raise ValueError('ec_connector_extra_config needs a "store": file:///path or redis://…')
        url = options.pop("store")
        self.counts: Counter[str] = Counter()
        self.logged: set[str] = set()
        self._store = open_store(url)
        self.namespace: str = options.pop("namespace", None) or derived_namespace(vllm_config)
        self._dtype = DTYPES[vllm_config.model_config.dtype]
        queue_length = int(options.pop("queue_length", 64))
        logger.info("encoder cache in %s, namespace %s", redacted(url), self.namespace)
        if role is ECConnectorRole.SCHEDULER:
            self._init_scheduler(vllm_config.model_config, options)
        else:
            self._writer = (
                Writer(self._store, queue_length) if self.is_producer and writes() else None
            )
            self._items: OrderedDict[str, tuple[str, Mapping[str, Any]]] = OrderedDict()
            self._side_stream: Any = None

    def _init_scheduler(self, model_config: Any, options: Mapping[str, Any]) -> None:
        self._fetcher = Fetcher(self._store, self.namespace, **options)
        self._resolver = PlaceholderMetadataResolver(model_config)
        # Building a processor takes its time: now rather than in a step.
        self._fields = {modality: self._resolver.fields_for(modality) for modality in MODALITIES}
        self._requests: dict[str, _Needs] = {}
        self._unavailable: set[str] = set()
        self._loads: dict[str, Entry] = {}
        self._register(model_config.served_model_name)

    @guarded(lambda: None)
    def _register(self, served_model_name: str | list[str]) -> None:
        names = [served_model_name] if isinstance(served_model_name, str) else served_model_name
        for name in names:
            known = self._store.namespaces().get(name)
            if known not in {None, self.namespace}:
                logger.warning(
                    "%s was served from namespace %s: another model, revision or dtype has used "
                    "this store. Nothing is shared with it.",
                    name,
                    known,
                )
            self._store.register_namespace(name, self.namespace)

    def shutdown(self) -> None:
        """Write what waits, for a bounded time, and close."""
        if self.role is ECConnectorRole.SCHEDULER:
            self._fetcher.close()
        elif self._writer is not None:
            self._writer.close()
        self._store.close()

    # Scheduler: before a step.

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether all that the request still needs is here or will have to be encoded here."""
        if not self.is_consumer:
            return True
        needs = self._needs(request)
        ready = True
        for feature in request.mm_features:
            position = feature.mm_position
            if position.offset + position.length <= num_computed_tokens:
                continue
            ready &= self._settled(request, needs, feature)
        return ready

    def _needs(self, request: Any) -> "_Needs":
        needs = self._requests.get(request.request_id)
        if needs is None or needs.preemptions != request.num_preemptions:
            # A preempted request may have lost what it had been given.
            self._release(request.request_id)
            needs = self._requests[request.request_id] = _Needs(request.num_preemptions)
        return needs

    def _settled(self, request: Any, needs: "_Needs", feature: Any) -> bool:
        identifier = feature.identifier
        if identifier in needs.settled:
            return True
        promised = identifier in (request.ec_transfer_params or {})
        state = self._fetcher.poll(identifier, promised=promised)
        if state is State.PENDING:
            return False
        entry = self._fetcher.entry(identifier)
        if state is State.READY and entry is not None and self._fits(entry, feature):
            self._fetcher.pin(identifier)
            needs.pinned.add(identifier)
        elif not self._has_media(feature):
            self.counts["failed_requests"] += 1
            self._unavailable.add(request.request_id)
            return False
        needs.settled.add(identifier)
        return True

    def _fits(self, entry: Entry, feature: Any) -> bool:
        fits = (
            entry.dtype == self._dtype
            and len(entry.shape) == 2  # noqa: PLR2004 - (tokens, width)
            and entry.shape[0] == feature.mm_position.get_num_embeds()
        )
        if not fits:
            self.counts["misfits"] += 1
        return fits

    def _has_media(self, feature: Any) -> bool:
        """Whether this engine could encode the item itself."""
        if feature.data is None:
            return False
        placeholder = self._fields.get(feature.modality, set())
        data = feature.data.get_data()
        return any(value is not None and key not in placeholder for key, value in data.items())

    def take_unavailable_requests(self) -> set[str]:
        """Requests that came without media for an entry that is not there: vLLM fails just them."""
        if self.role is not ECConnectorRole.SCHEDULER:
            return set()
        taken, self._unavailable = self._unavailable, set()
        return taken

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the entry is in this process's memory, held for a request."""
        return self.is_consumer and self._fetcher.is_pinned(identifier)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Load the entry in this step, if it is here."""
        identifier = request.mm_features[index].identifier
        if not self.is_consumer or not self.has_cache_item(identifier):
            return
        entry = self._fetcher.entry(identifier)
        if entry is not None:
            self._loads[identifier] = entry

    @guarded(StepMetadata)
    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """What the workers load and may have to save in this step."""
        step = StepMetadata()
        for identifier, entry in self._loads.items():
            raw = np.frombuffer(entry.data, dtype=np.uint8)
            step.loads[identifier] = (raw, entry.dtype, entry.shape)
        self._loads.clear()
        if self.is_producer:
            for request in scheduler_output.scheduled_new_reqs:
                modalities = {one.identifier: one.modality for one in request.mm_features}
                reported = collect_ec_item_metadata(request.mm_features, self._resolver)
                for identifier, item in reported.items():
                    step.items[identifier] = (modalities[identifier], item["metadata"])
        return step

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Let go of what was held for it; a producer tells what it encoded."""
        self._release(request.request_id)
        return False, self._report(request) if self.is_producer else None

    @guarded(lambda: None)
    def _report(self, request: Any) -> dict[str, Any] | None:
        items = collect_ec_item_metadata(request.mm_features, self._resolver)
        for item in items.values():
            item["namespace"] = self.namespace
        return items or None

    def _release(self, request_id: str) -> None:
        needs = self._requests.pop(request_id, None)
        if needs is not None:
            for identifier in needs.pinned:
                self._fetcher.unpin(identifier)

    # Workers: in a step.

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **_: Any) -> None:
        """Put this step's entries into the encoder cache.

        All that can be wrong with an entry was checked before the step: what could still fail here
        is the device itself.
        """
        step = self._get_connector_metadata()
        for identifier, (raw, dtype, shape) in step.loads.items():
            if identifier not in encoder_cache:
                encoder_cache[identifier] = to_device(raw, TORCH_DTYPES[dtype], shape)

    @guarded(lambda: None)
    def start_save_caches(self, **kwargs: Any) -> None:
        """Save items of new requests that an earlier step has encoded: the store may lack them."""
        encoder_cache = kwargs.get("encoder_cache") or {}
        for identifier, item in self._get_connector_metadata().items.items():
            self._items[identifier] = item
            self._items.move_to_end(identifier)
            if identifier in encoder_cache:
                self._save(identifier, encoder_cache[identifier])
        while len(self._items) > MAX_DESCRIPTIONS:
            self._items.popitem(last=False)

    @guarded(lambda: None)
    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **_: Any) -> None:
        """Save an item that was just encoded."""
        self._save(mm_hash, encoder_cache[mm_hash])

    def _save(self, identifier: str, tensor: torch.Tensor) -> None:
        item = self._items.get(identifier)
        if self._writer is None or item is None:
            return
        make = functools.partial(self._entry, tensor.detach(), ready_event(tensor), *item)
        self._writer.submit(EntryKey(self.namespace, identifier), make)

    def _entry(
        self, tensor: torch.Tensor, event: Any, modality: str, metadata: Mapping[str, Any]
    ) -> Entry:
        """The entry of an encoded item; called on the writer's thread."""
        if tensor.device.type != "cpu" and self._side_stream is None:
            self._side_stream = torch.Stream(tensor.device)
        host = to_host(tensor, event, self._side_stream)
        data = memoryview(host.view(torch.uint8).reshape(-1).numpy()).cast("B")
        return Entry(data, DTYPES[host.dtype], tuple(host.shape), modality, metadata)

    def build_connector_worker_meta(self) -> WorkerCounts | None:
        """What this worker has counted."""
        counts = self.counts
        self.counts = Counter()
        if self._writer is not None:
            written, self._writer.counts = self._writer.counts, Counter()
            counts = counts + written
        return WorkerCounts(counts) if counts else None

    # Figures.

    def update_connector_output(self, connector_output: Any) -> None:
        """Add what the workers have counted."""
        counted = connector_output.ec_connector_worker_meta
        if isinstance(counted, WorkerCounts):
            self.counts += counted.counts

    def get_ec_connector_stats(self) -> "StoreConnectorStats | None":
        """What was counted since the last call."""
        if self.role is not ECConnectorRole.SCHEDULER:
            return None
        counts, self.counts = self.counts + self._fetcher.counts, Counter()
        self._fetcher.counts = Counter()
        return StoreConnectorStats(dict(counts)) if counts else None

    @classmethod
    def build_ec_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> "StoreConnectorStats | None":
        """Figures as vLLM's logger gets them."""
        return StoreConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> "StorePromMetrics":
        """Figures on vLLM's `/metrics`."""
        return StorePromMetrics(*args, **kwargs)


@dataclass(slots=True)
class _Needs:
    """What a request waits for.

    Attributes:
        preemptions: how often it had been preempted when this was begun.
        settled: identifiers of which nothing more is to be found out.
        pinned: those that are held in memory for it.
    """

    preemptions: int
    settled: set[str] = field(default_factory=set)
    pinned: set[str] = field(default_factory=set)


class StoreConnectorStats(ECConnectorStats):
    """Counts by name."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Forget them."""
        self.data = {}

    def aggregate(self, other: ECConnectorStats) -> "StoreConnectorStats":
        """The sum of both."""
        return StoreConnectorStats(dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        """As they are."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


COUNTERS = {
    "hits": "Entries that were fetched from the store.",
    "misses": "Entries that were looked for and are not in the store.",
    "timeouts": "Entries that did not come in time.",
    "bypassed": "Entries that were not looked for because the store was failing.",
    "errors": "Fetches that the store failed.",
    "misfits": "Entries of another shape or dtype than the request needs.",
    "failed_requests": "Requests without media whose entry could not be had.",
    "bytes": "Bytes fetched.",
    "seconds": "Seconds spent fetching, over all threads.",
    "saves": "Entries written.",
    "known": "Entries that were there already.",
    "drops": "Entries that were not written: queue full, or the store failed.",
    "save_bytes": "Bytes written.",
    "save_seconds": "Seconds spent writing.",
    "exceptions": "Exceptions kept from the engine.",
}


class StorePromMetrics(ECConnectorPromMetrics):
    """One Prometheus counter for each name, `vllm:ec_store_<name>`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register them."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[int, dict[str, Any]] = {
            engine: {} for engine in per_engine_labelvalues
        }
        for name, text in COUNTERS.items():
            counter = self._counter_cls(
                name=f"vllm:ec_store_{name}", documentation=text, labelnames=labelnames
            )
            for engine, values in per_engine_labelvalues.items():
                self._counters[engine][name] = counter.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add counts."""
        for name, count in transfer_stats_data.items():
            if name in COUNTERS:
                self._counters[engine_idx][name].inc(count)


def derived_namespace(vllm_config: Any) -> str:
    """Which model made an entry: equal exactly where engines may share their encoder outputs.

    It covers the model's name or path and its revision, its whole configuration, the dtype, the
    quantization, the processor options of the server, and the format. Engines that serve one model
    from different paths need the same `namespace` set by hand.
    """
    model = vllm_config.model_config
    multimodal = model.multimodal_config
    facts = {
        "format": FORMAT,
        "model": model.model,
        "revision": model.revision,
        "config": model.hf_config.to_dict(),
        "dtype": DTYPES[model.dtype],
        "quantization": model.quantization,
        "mm_processor_kwargs": multimodal and multimodal.mm_processor_kwargs,
    }
    encoded = orjson.dumps(
        facts, default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS
    )
    name = str(model.model).rstrip("/").rpartition("/")[2]
    return f"{name}@{model.revision or 'main'}:{hashlib.sha256(encoded).hexdigest()[:16]}"


def writes() -> bool:
    """Whether this worker is the one of its tensor-parallel group that writes."""
    from vllm.distributed.parallel_state import (  # noqa: PLC0415 - known once workers are up
        get_tensor_model_parallel_rank,
    )

    return bool(get_tensor_model_parallel_rank() == 0)


def to_device(raw: np.ndarray[Any, Any], dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
    """A tensor of these bytes where the model runs; through pinned memory to an accelerator."""
    device = torch.accelerator.current_accelerator(check_available=True)
    host = torch.empty(raw.nbytes, dtype=torch.uint8, pin_memory=device is not None)
    host.numpy()[:] = raw
    tensor = host.view(dtype).reshape(*shape)
    return tensor if device is None else tensor.to(device, non_blocking=True)


def ready_event(tensor: torch.Tensor) -> Any:
    """An event after the work that makes the tensor; None on a CPU."""
    if tensor.device.type == "cpu":
        return None
    event = torch.Event(tensor.device)
    event.record(torch.accelerator.current_stream(tensor.device))
    return event


def to_host(tensor: torch.Tensor, event: Any, stream: Any) -> torch.Tensor:
    """The tensor in host memory, contiguous; from an accelerator on a stream of its own."""
    if event is None:
        return tensor.contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    with stream:
        stream.wait_event(event)
        host.copy_(tensor, non_blocking=True)
    stream.synchronize()
    return host
