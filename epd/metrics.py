"""An observer that counts, for `GET /metrics` in Prometheus' text format."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from epd.events import InstanceChanged, RequestDone, StageDone

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
"""Upper bounds of histogram buckets."""


class MetricsObserver:
    """Counts events in a registry of its own."""

    def __init__(self) -> None:
        """Begin at nothing."""
        self._registry = CollectorRegistry()
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
            "How often an instance was ejected, was down, was put on trial and became healthy.",
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

    def stage_done(self, event: StageDone) -> None:
        """Add its time."""
        failed = "true" if event.error else "false"
        self._stages.labels(event.stage, failed).observe(event.seconds)

    def request_done(self, event: RequestDone) -> None:
        """Count it and its items."""
        self._requests.labels(event.path, str(event.status)).inc()
        self._retries.inc(event.retries)
        for result, count in event.items.items():
            self._items.labels(result).inc(count)

        for kind in event.degraded:
            self._degraded.labels(kind).inc()

    def instance_changed(self, event: InstanceChanged) -> None:
        """Count it."""
        self._instances.labels(event.role, event.state).inc()

    def page(self) -> bytes:
        """All figures."""
        return generate_latest(self._registry)
