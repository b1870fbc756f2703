"""Metrics of one process: counted events."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from epd.edge.admission import Admission
from epd.events import (
    CLIENT_CLOSED,
    GAPS_S,
    InstanceChanged,
    Modality,
    RequestRecord,
    StageDone,
)
from epd.observe import logs, metric_defs
from epd.observe.collectors import admission_metrics
from epd.observe.metric_values import CounterValues, HistogramValues
from epd.observe.worker_metrics import WorkerMetrics
from epd.shared_page import SharedPage
from epd.version import __version__

OF_LATE = 0.1
"""Weight of the latest encode in the moving mean of encode times."""


class MetricsObserver(Collector):
    """Observer that counts events.

    Attributes:
        workers: sums over all workers; None with a single one.
    """

    def __init__(
        self, admission: Admission, pages: Sequence[SharedPage] = (), index: int = 0
    ) -> None:
        """Start all counters at 0, and register the metrics of `admission`.

        With several workers, `pages` has the page of each, this worker's at `index`.
        """
        self._requests = CounterValues(metric_defs.REQUESTS)
        self._request_seconds = HistogramValues(metric_defs.REQUEST_SECONDS)
        self._first_tokens = HistogramValues(metric_defs.FIRST_TOKEN_SECONDS)
        self._gaps = HistogramValues(metric_defs.CHUNK_SECONDS, GAPS_S)
        self._stages = HistogramValues(metric_defs.STAGE_SECONDS)
        self._kv_waits = HistogramValues(metric_defs.KV_WAIT_SECONDS)
        self._items = CounterValues(metric_defs.ITEMS)
        self._sent = CounterValues(metric_defs.ITEMS_SENT)
        self._decisions = CounterValues(metric_defs.ENCODE_DECISIONS)
        self._waits = CounterValues(metric_defs.ENCODE_WAITS)
        self._saved_encodes = CounterValues(metric_defs.SAVED_ENCODES)
        self._saved_bytes = CounterValues(metric_defs.SAVED_BYTES)
        self._saved_seconds = CounterValues(metric_defs.SAVED_ENCODE_SECONDS)
        self._retries = CounterValues(metric_defs.RETRIES)
        self._degraded = CounterValues(metric_defs.DEGRADED)
        self._policies = CounterValues(metric_defs.POLICIES)
        self._disconnects = CounterValues(metric_defs.DISCONNECTS)
        self._releases = CounterValues(metric_defs.KV_RELEASES)
        self._instances = CounterValues(metric_defs.INSTANCE_CHANGES)
        self._background = CounterValues(metric_defs.BACKGROUND_FAILURES)
        self._encode_s: dict[Modality, float] = {}
        self._reloaded = 1.0
        self._loop_lag_s = 0.0
        self._sources: list[Callable[[], Iterable[Metric]]] = [
            partial(admission_metrics, admission)
        ]
        self.workers = WorkerMetrics(self, pages, index) if pages else None

    def add_source(self, read: Callable[[], Iterable[Metric]]) -> None:
        """Show the families that `read` returns at each scrape."""
        self._sources.append(read)

    def collect(self) -> Iterator[Metric]:
        """Yield the values of all counters and gauges of this process."""
        for value in vars(self).values():
            if isinstance(value, CounterValues | HistogramValues):
                yield from value.collect()
        yield metric_defs.RELOADED.metric_family([((), self._reloaded)])
        yield metric_defs.LOOP_LAG.metric_family([((), self._loop_lag_s)])
        yield metric_defs.LOG_LINES_DROPPED.metric_family([((), logs.dropped_lines())])
        yield metric_defs.BUILD.metric_family([((__version__,), 1)])
        for read in self._sources:
            yield from read()

    def reloaded(self, success: bool) -> None:
        self._reloaded = float(success)

    def background_failed(self, task: str, count: int) -> None:
        self._background.add((task,), count)

    def loop_lag(self, seconds: float) -> None:
        self._loop_lag_s = seconds

    def stage_done(self, event: StageDone) -> None:
        failed = event.error is not None
        outcome = "rejected" if event.rejected else failed
        self._stages.histogram_for((event.model_name, event.stage, outcome)).add(event.seconds)
        if event.stage == "release":
            self._releases.add(("failed" if failed else "ok",))
        elif event.modality is not None and not failed:
            mean_s = self._encode_s.get(event.modality, event.seconds)
            self._encode_s[event.modality] = mean_s + OF_LATE * (event.seconds - mean_s)

    def request_done(self, event: RequestRecord) -> None:
        model = event.model_name
        self._requests.add((model, event.path, event.status))
        self._request_seconds.histogram_for((model, event.path)).add(event.seconds)
        if event.first_token_s is not None:
            self._first_tokens.histogram_for((model,)).add(event.first_token_s)
        if event.gaps is not None:
            self._gaps.histogram_for((model,)).merge(event.gaps)
        if event.kv_wait_s is not None:
            self._kv_waits.histogram_for(()).add(event.kv_wait_s)
        if event.status == CLIENT_CLOSED:
            self._disconnects.add((event.at,))
        if event.retries:
            self._retries.add((model,), event.retries)
        for kind in event.degraded:
            self._degraded.add((model, kind))
        if event.policy is not None:
            self._policies.add((model, event.policy))
        if event.items or event.placements or event.media:
            self._count_items(model, event)

    def _count_items(self, model: str, event: RequestRecord) -> None:
        for labels, count in event.placements.items():
            self._decisions.add((model, *labels), count)
        for result, count in event.items.items():
            self._items.add((model, result), count)
        if event.waits:
            self._waits.add((model,), event.waits)
        for modality, count in event.hits.items():
            self._saved_encodes.add((model,), count)
            self._saved_seconds.add((model,), count * self._encode_s.get(modality, 0.0))
        if event.saved_bytes:
            self._saved_bytes.add((model,), event.saved_bytes)
        for form, count in event.media.items():
            if count:
                self._sent.add((model, form), count)

    def instance_changed(self, event: InstanceChanged) -> None:
        self._instances.add((event.role, event.state))

    def collect_all(self) -> Iterable[Metric]:
        """Return the values of all workers, with the current ones of this process."""
        if self.workers is None:
            return self.collect()
        self.workers.refresh()
        return self.workers.collect()

    async def page(self, accept: str) -> tuple[bytes, str]:
        """Return the page of all workers and its media type: OpenMetrics if `accept` asks for it.

        With several workers the page is made on a thread, because it takes far longer.
        """
        encode, content_type = choose_encoder(accept)
        if self.workers is None:
            return encode(self), content_type
        self.workers.refresh()
        return await asyncio.to_thread(encode, self.workers), content_type
