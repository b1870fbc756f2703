"""Metrics of the connector on vLLM's own `/metrics`."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.metrics import (
    ECConnectorPromMetrics,
    ECConnectorStats,
)
from vllm.platforms import current_platform

from ec_store.vllm_connector.config import ConnectorConfig
from ec_store.vllm_connector.host_info import HostInfo
from ec_store.vllm_connector.namespace import namespace_of

logger = logging.getLogger("vllm.ec_store")

NAMESPACE = "namespace"
"""Name under which the scheduler's namespace, a text, is sent with the metrics."""

COUNTERS = {
    "hits": "Entries fetched from the store.",
    "misses": "Entries that were looked up and are not in the store.",
    "timeouts": "Fetches that missed their deadline.",
    "late": "Results of fetches that arrived after their deadline. Their entries are kept.",
    "bypassed": "Lookups skipped because the store kept failing or all threads hung.",
    "errors": "Fetches that failed with an error of the store.",
    "corrupt": "Corrupt entries that were found.",
    "misfits": "Entries of another dtype or shape than the model or the item needs.",
    "nonfinite": "Encoder outputs with NaN or infinite values: not stored, or counted as misses.",
    "failed_requests": "Failed requests: they came without media, and their entry was missing.",
    "bytes": "Bytes fetched from the store.",
    "saves": "Entries written to the store.",
    "known": "Entries that were not written because the store had them.",
    "drops": "Entries that were not written because the queue was full or the store failed.",
    "save_bytes": "Bytes written to the store.",
    "exceptions": "Exceptions that the connector caught to protect the engine.",
}

GAUGES = {
    "held_bytes": "Host memory of entries in the scheduler's process, pinned or kept.",
    "pinned_bytes": "Host memory of entries that requests need.",
    "queued_bytes": "Host memory reserved for fetches that wait for a thread.",
    "inflight_bytes": "Host memory reserved for fetches that run, or have just ended.",
    "queue_depth": "Fetches that wait for a thread.",
    "host_connections": "Connections of the engine's processes to the server of the host's memory.",
    "host_mapped_bytes": "Bytes of the host's memory that processes have mapped, summed over them.",
    "host_registered_bytes": "Bytes of it that are registered with CUDA, summed over processes.",
    "breaker_open": "1 while lookups are skipped: fetches failed in a row, or all threads hang.",
}

HISTOGRAMS = {
    "fetch_wait_seconds": "Seconds from a request's first step until a thread takes its fetch.",
    "fetch_seconds": "Seconds from when a thread takes a fetch until the store has answered.",
    "save_seconds": "Seconds from when the writer takes an entry until the store has it or failed.",
    "eviction_seconds": "Seconds of each eviction that a write needed. Redis evicts by itself.",
}

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class StoreConnectorStats(ECConnectorStats):
    """Metrics by name: counts, current values of gauges, and observations of histograms.

    The scheduler's namespace is sent with them.
    """

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: ECConnectorStats) -> "StoreConnectorStats":
        """Return the sum of the counts, all observations, and the later gauges, from `other`."""
        merged = dict(self.data)
        for name, value in other.data.items():
            replaces = name in GAUGES or name == NAMESPACE or name not in merged
            merged[name] = value if replaces else merged[name] + value
        return StoreConnectorStats(merged)

    def reduce(self) -> dict[str, int | float]:
        """Return counts and gauges unchanged, and the mean of each histogram's observations."""
        return {
            name: sum(value) / len(value) if isinstance(value, list) else value
            for name, value in self.data.items()
            if name != NAMESPACE
        }

    def is_empty(self) -> bool:
        return not self.data


class StorePromMetrics(ECConnectorPromMetrics):
    """Prometheus metrics `vllm:ec_store_<name>`, one for each name above, and the namespace.

    vLLM passes metrics on at the end of a step: gauges of an idle engine are those of its last one.
    Proxies read the namespace, a label, and whether the engine writes, see `epd.routing.load`.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        gauge = partial(self._gauge_cls, multiprocess_mode="mostrecent")
        kinds: tuple[tuple[Callable[..., Any], dict[str, str]], ...] = (
            (self._counter_cls, COUNTERS),
            (gauge, GAUGES),
            (partial(self._histogram_cls, buckets=BUCKETS_S), HISTOGRAMS),
        )
        self._metrics: dict[int, dict[str, Any]] = {engine: {} for engine in per_engine_labelvalues}
        for make, meanings in kinds:
            for name, meaning in meanings.items():
                full_name = f"vllm:ec_store_{name}"
                metric = make(name=full_name, documentation=meaning, labelnames=labelnames)
                for engine, values in per_engine_labelvalues.items():
                    self._metrics[engine][name] = metric.labels(*values)

        options = vllm_config.ec_transfer_config.ec_connector_extra_config or {}
        config = ConnectorConfig.model_validate(options)
        namespace = namespace_of(vllm_config, config.generation)
        HostInfo(gauge, labelnames, per_engine_labelvalues.values(), config.store)
        self._info = gauge(
            name="vllm:ec_store_namespace_info",
            documentation="1 for the namespace of this engine's encoder outputs.",
            labelnames=[*labelnames, "namespace"],
        )
        producer = gauge(
            name="vllm:ec_store_producer",
            documentation="1 if this engine writes its encoder outputs to the store, 0 if not.",
            labelnames=labelnames,
        )
        prepares = _preparation(vllm_config)
        preparation = gauge(
            name="vllm:ec_store_preparation_info",
            documentation="1 for how this engine prepares media: the number of its API servers, "
            "the devices of processor and model, and the modalities with media_io_kwargs.",
            labelnames=[*labelnames, *prepares],
        )
        self._namespaces = dict.fromkeys(per_engine_labelvalues, namespace)
        for values in per_engine_labelvalues.values():
            self._info.labels(*values, namespace).set(1)
            producer.labels(*values).set(vllm_config.ec_transfer_config.is_ec_producer)
            preparation.labels(*values, *prepares.values()).set(1)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add counts and observations, and set gauges; names of other releases are ignored."""
        for name, value in transfer_stats_data.items():
            metric: Any = self._metrics[engine_idx].get(name)
            if name in COUNTERS:
                metric.inc(value)
            elif name in GAUGES:
                metric.set(value)
            elif name in HISTOGRAMS:
                for observation in value:
                    metric.observe(observation)
            elif name == NAMESPACE and value != self._namespaces[engine_idx]:
                self._publish(value, engine_idx)

    def _publish(self, namespace: str, engine_idx: int) -> None:
        """Replace this process's namespace by the scheduler's, under which entries are read."""
        logger.error(
            "this engine derives two namespaces: the process that serves /metrics derives %s, the "
            "scheduler of engine %d reads %s. /metrics names the scheduler's from now on. Make "
            "sure that both processes have the same vLLM, the same ec_store, the same environment "
            "and the same files of the model; if they have, report the model's architecture with "
            "both names.",
            self._namespaces[engine_idx],
            engine_idx,
            namespace,
        )
        labels = self.per_engine_labelvalues[engine_idx]
        self._info.labels(*labels, self._namespaces[engine_idx]).set(0)
        self._info.labels(*labels, namespace).set(1)
        self._namespaces[engine_idx] = namespace


def _preparation(vllm_config: Any) -> dict[str, str]:
    """Return how an engine prepares media, as the labels of a metric.

    Each API server has one thread for the processor (`BaseRenderer._mm_executor`,
    `vllm/renderers/base.py`).
    """
    settings = vllm_config.model_config.multimodal_config
    given = {} if settings is None else settings.media_io_kwargs
    processor = None if settings is None else settings.get_mm_processor_device_type()
    return {
        "api_servers": str(vllm_config.parallel_config._api_process_count),  # noqa: SLF001
        "processor": processor or "cpu",
        "device": current_platform.device_type or "cpu",
        "media_io": ",".join(sorted(modality for modality, kwargs in given.items() if kwargs)),
    }
