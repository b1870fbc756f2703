"""An observer that counts, for `GET /metrics`."""

import asyncio
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from epd.edge.admission import Admission
from epd.events import GAPS_S, InstanceChanged, Modality, RequestRecord, StageDone
from epd.observe import figures
from epd.observe.glances import AdmissionGlance
from epd.observe.hit_ratio import WithHitRatio
from epd.observe.tallies import Counted, Spread
from epd.observe.worker_metrics import WorkerMetrics
from epd.version import __version__

CLIENT_LEFT = 499
"""nginx's status for it."""

OF_LATE = 0.1
"""How much of the mean time of an encode the last one is."""


class MetricsObserver(Collector):
    """Counts events.

    Attributes:
        registry: what is counted here, and what is read elsewhere when the page is asked for.
        shown: what the page shows: the same; of several workers, what all have.
    """

    def __init__(self, admission: Admission) -> None:
        """Begin at nothing; what `admission` counts is on the page too."""
        self._requests = Counted(figures.REQUESTS)
        self._request_seconds = Spread(figures.REQUEST_SECONDS)
        self._first_tokens = Spread(figures.FIRST_TOKEN_SECONDS)
        self._gaps = Spread(figures.CHUNK_SECONDS, GAPS_S)
        self._stages = Spread(figures.STAGE_SECONDS)
        self._kv_waits = Spread(figures.KV_WAIT_SECONDS)
        self._items = Counted(figures.ITEMS)
        self._sent = Counted(figures.ITEMS_SENT)
        self._waits = Counted(figures.ENCODE_WAITS)
        self._saved_encodes = Counted(figures.SAVED_ENCODES)
        self._saved_bytes = Counted(figures.SAVED_BYTES)
        self._saved_seconds = Counted(figures.SAVED_ENCODE_SECONDS)
        self._retries = Counted(figures.RETRIES)
        self._degraded = Counted(figures.DEGRADED)
        self._policies = Counted(figures.POLICIES)
        self._disconnects = Counted(figures.DISCONNECTS)
        self._releases = Counted(figures.KV_RELEASES)
        self._instances = Counted(figures.INSTANCE_CHANGES)
        self._background = Counted(figures.BACKGROUND_FAILURES)
        self._encode_s: dict[Modality, float] = {}
        self._reloaded = 1.0
        self._loop_lag_s = 0.0
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.registry.register(AdmissionGlance(admission))
        self.shown: Collector = self.registry

    def collect(self) -> Iterator[Metric]:
        """What was counted so far."""
        for value in vars(self).values():
            if isinstance(value, Counted | Spread):
                yield value.collect()
        yield figures.RELOADED.family([((), self._reloaded)])
        yield figures.LOOP_LAG.family([((), self._loop_lag_s)])
        yield figures.BUILD.family([((__version__,), 1)])

    def reloaded(self, success: bool) -> None:
        """Say how it ended."""
        self._reloaded = float(success)

    def background_failed(self, task: str, count: int) -> None:
        """Count so many unexpected exceptions of a background task."""
        self._background.add((task,), count)

    def loop_lag(self, seconds: float) -> None:
        """Show how long the event loop kept others waiting."""
        self._loop_lag_s = seconds

    def stage_done(self, event: StageDone) -> None:
        """Add its time."""
        failed = event.error is not None
        outcome = "rejected" if event.rejected else failed
        self._stages.of((event.model_name, event.stage, outcome)).add(event.seconds)
        if event.stage == "release":
            self._releases.add(("failed" if failed else "ok",))
        elif event.modality is not None and not failed:
            mean_s = self._encode_s.get(event.modality, event.seconds)
            self._encode_s[event.modality] = mean_s + OF_LATE * (event.seconds - mean_s)

    def request_done(self, event: RequestRecord) -> None:
        """Count it and its items."""
        model = event.model_name
        self._requests.add((model, event.path, event.status))
        self._request_seconds.of((model, event.path)).add(event.seconds)
        if event.first_token_s is not None:
            self._first_tokens.of((model,)).add(event.first_token_s)
        if event.gaps is not None:
            self._gaps.of((model,)).merge(event.gaps)
        if event.kv_wait_s is not None:
            self._kv_waits.of(()).add(event.kv_wait_s)
        if event.status == CLIENT_LEFT:
            self._disconnects.add((event.at,))
        if event.retries:
            self._retries.add((model,), event.retries)
        for kind in event.degraded:
            self._degraded.add((model, kind))
        if event.policy is not None:
            self._policies.add((model, event.policy))
        if event.items:
            self._count_items(model, event)
        if event.media:
            self._count_media(model, event)

    def _count_items(self, model: str, event: RequestRecord) -> None:
        for result, count in event.items.items():
            self._items.add((model, result), count)
        if event.waits:
            self._waits.add((model,), event.waits)
        for modality, count in event.hits.items():
            self._saved_encodes.add((model,), count)
            self._saved_seconds.add((model,), count * self._encode_s.get(modality, 0.0))
        if event.saved_bytes:
            self._saved_bytes.add((model,), event.saved_bytes)

    def _count_media(self, model: str, event: RequestRecord) -> None:
        for form, count in event.media.items():
            if count:
                self._sent.add((model, form), count)

    def instance_changed(self, event: InstanceChanged) -> None:
        """Count it."""
        self._instances.add((event.role, event.state))

    def page(self, accept: str = "") -> tuple[bytes, str]:
        """All figures, and their media type: OpenMetrics where `accept` asks for it."""
        encode, content_type = choose_encoder(accept)
        return encode(WithHitRatio(self.shown)), content_type

    async def page_of_all(self, accept: str = "") -> tuple[bytes, str]:
        """Return the page; that of several workers is made on a thread, as it takes far longer."""
        if not isinstance(self.shown, WorkerMetrics):
            return self.page(accept)
        encode, content_type = choose_encoder(accept)
        page = WithHitRatio(self.shown.written())
        return await asyncio.to_thread(encode, page), content_type
