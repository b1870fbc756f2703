"""An observer that counts, for `GET /metrics` in Prometheus' text format."""

from collections.abc import Iterator
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epd.edge.admission import REFUSALS, Admission
from epd.events import InstanceChanged, RequestDone, StageDone

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
"""Upper bounds of histogram buckets."""


class AdmissionCollector(Collector):
    """Who is in and who waits, read when the page is asked for."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        """The figures of this moment."""
        door = self._admission.door
        for name, documentation, value in (
            ("epd_requests_in_flight", "Requests that are being served.", door.inside),
            ("epd_requests_queued", "Requests that wait for their turn.", door.waiting),
            (
                "epd_body_bytes_in_flight",
                "Bytes of the bodies of requests that are being served.",
                self._admission.body_bytes,
            ),
        ):
            yield GaugeMetricFamily(name, documentation, value)
        refused = CounterMetricFamily(
            "epd_requests_refused", "Requests that were sent away, by why.", labels=["reason"]
        )
        for reason in REFUSALS:
            refused.add_metric([reason], self._admission.refused[reason])
        yield refused


class MetricsObserver:
    """Counts events in a registry of its own.

    Attributes:
        shown: what the page shows: what is counted here; of several workers, by all of them.
    """

    def __init__(self, admission: Admission) -> None:
        """Begin at nothing; what `admission` counts is on the page too."""
        self._registry = CollectorRegistry()
        self.shown: Collector = self._registry
        self._registry.register(AdmissionCollector(admission))
        self._items = Counter(
            "epd_items",
            "Media items of answered requests, by where their encoder outputs came from.",
            ["result"],
            registry=self._registry,
        )
        self._retries = Counter(
            "epd_request_retries",
            "Requests that were begun anew with their media, since an entry may have been lost.",
            registry=self._registry,
        )
        self._degraded = Counter(
            "epd_requests_degraded",
            "Requests of which a stage's work was done in another stage.",
            ["kind"],
            registry=self._registry,
        )
        self._instances = Counter(
            "epd_instance_changes",
            "How often an instance was added, removed, refused, ejected, down, on trial, healthy.",
            ["role", "state"],
            registry=self._registry,
        )
        self._requests = Counter(
            "epd_requests",
            "Clients' requests that have ended; status 499 is a client that left.",
            ["path", "status"],
            registry=self._registry,
        )
        self._stages = Histogram(
            "epd_stage_seconds",
            "Requests to instances and to the store, until they were answered or failed.",
            ["stage", "failed"],
            buckets=SECONDS,
            registry=self._registry,
        )
        # To look up what has these labels costs more than to count, and there are few of them.
        self._request = cache(self._requests.labels)
        self._stage = cache(self._stages.labels)
        self._kv_waits = Histogram(
            "epd_kv_wait_seconds",
            "From prefill's answer to decode's first event, in streams.",
            buckets=SECONDS,
            registry=self._registry,
        )
        self._reloaded = Gauge(
            "epd_config_last_reload_success",
            "1 where all files that were read last could be used; 0: older ones are in force.",
            registry=self._registry,
        )
        self._reloaded.set(1)
        self._loop_lag = Gauge(
            "epd_event_loop_lag_seconds",
            "The longest that the event loop kept others waiting, of the last 15 s.",
            registry=self._registry,
        )

    def reloaded(self, success: bool) -> None:
        """Say how it ended."""
        self._reloaded.set(success)

    def stage_done(self, event: StageDone) -> None:
        """Add its time."""
        failed = "true" if event.error else "false"
        self._stage(event.stage, failed).observe(event.seconds)

    def request_done(self, event: RequestDone) -> None:
        """Count it and its items."""
        self._request(event.path, event.status).inc()
        if event.retries:
            self._retries.inc(event.retries)
        for result, count in event.items.items():
            self._items.labels(result).inc(count)
        if event.kv_wait_s is not None:
            self._kv_waits.observe(event.kv_wait_s)
        for kind in event.degraded:
            self._degraded.labels(kind).inc()

    def instance_changed(self, event: InstanceChanged) -> None:
        """Count it."""
        self._instances.labels(event.role, event.state).inc()

    def loop_lag(self, seconds: float) -> None:
        """Show how long the event loop kept others waiting."""
        self._loop_lag.set(seconds)

    def page(self) -> bytes:
        """All figures."""
        return generate_latest(self.shown)
