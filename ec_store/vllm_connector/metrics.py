"""The connector's figures on vLLM's own `/metrics`."""

from collections import Counter
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.metrics import (
    ECConnectorPromMetrics,
    ECConnectorStats,
)

COUNTERS = {
    "hits": "Entries that were fetched from the store.",
    "misses": "Entries that were looked for and are not in the store.",
    "timeouts": "Entries that did not come in time.",
    "bypassed": "Entries that were not looked for because the store was failing.",
    "errors": "Fetches that the store failed.",
    "corrupt": "Entries that were found corrupt.",
    "misfits": "Entries of another shape or dtype than the request needs.",
    "failed_requests": "Requests without media whose entry could not be had.",
    "bytes": "Bytes fetched.",
    "seconds": "Seconds spent fetching, over all threads.",
    "saves": "Entries written.",
    "known": "Entries that were there already.",
    "drops": "Entries that were not written: too much waited, or the store failed.",
    "save_bytes": "Bytes written.",
    "save_seconds": "Seconds spent writing.",
    "exceptions": "Exceptions kept from the engine.",
}


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
