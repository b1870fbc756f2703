"""HTTP service of a store: its metrics, and the maintenance that keeps its quota."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from ec_store.access import is_key
from ec_store.aio import AsyncStore
from ec_store.base import MemoryStats, StoreStats
from ec_store.errors import StoreUnavailable
from ec_store.keys import EntryKey

logger = logging.getLogger("vllm.ec_store")

STORE = web.AppKey("store", AsyncStore)
API_KEY = web.AppKey("api_key", str)

SWEEP_EVERY_S = 86400.0
"""Interval in seconds between two sweeps of all entries. Eviction removes the expired entries that
it samples."""

BUCKETS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 600.0)

LATE_INTERVALS = 3
"""Number of intervals without a success after which failing maintenance is unhealthy."""

LONGEST_S = 600.0
"""Seconds after which maintenance that has not ended is unhealthy: a sweep of a million entries
takes about a minute."""

OPEN_PATHS = frozenset({"/health"})

GAUGES = {
    "entries": "Number of entries in the store.",
    "bytes": "Bytes that the entries take; in a directory in whole blocks of 4 KiB.",
    "max_bytes": "Effective quota of the store in bytes.",
    "leased": "Number of entries that leases protect from eviction.",
}
MEMORY_GAUGES = {
    "clients": "Number of connections to the memory. Only of a host's memory, as those below.",
    "pinned_bytes": "Bytes of entries that readers protect from eviction.",
    "leased_bytes": "Bytes of entries that leases protect from eviction.",
    "begun_bytes": "Bytes of entries that are being written.",
    "gone_bytes": "Bytes that clients had pinned or begun which lost their connection. They are "
    "freed when the process ends, or reports the end of its copies.",
}
"""Metrics of `MemoryStats` by name."""
COUNTERS = {
    "corrupt": "Corrupt entries that this service found.",
    "evictions": "Entries evicted by this service.",
}
TIER_COUNTERS = {
    "hits": "Entries that were looked up in the tier and found. The label `tier` is the scheme of "
    "its URL.",
    "misses": "Entries that were looked up in the tier and not found.",
    "skipped": "Lookups of entries in the tier that were skipped: it keeps failing or is busy.",
    "late": "Lookups of any number of entries that went on in the background: they were too slow.",
    "claims": "Claims of missing entries that a shared tier gave to this host, renewals included.",
    "claimed_elsewhere": "Claims that a shared tier refused, because another host has them.",
    "claimed_alone": "Claims that count on this host only, because a shared tier was skipped or "
    "late. Two hosts may encode the same item.",
    "fetched": "Entries copied from the tier into the memory.",
    "fetched_bytes": "Bytes copied from the tier into the memory.",
    "sent": "Entries copied from the memory to the tier.",
    "sent_bytes": "Bytes copied from the memory to the tier.",
    "known": "Entries that were not sent to the tier because it had them. In a shared tier, these "
    "are items that were encoded twice.",
    "drops": "Entries that were not copied from or to the tier: no room, too late, or a failure.",
    "errors": "Calls of the tier that failed or missed their deadline.",
    "corrupt": "Corrupt entries of the memory that were deleted and not sent to the tier.",
    "found_corrupt": "Corrupt entries that were found in the tier. They are misses.",
}
TIER_GAUGES = {
    "queued": "Entries that wait to be sent to the tier.",
    "queued_bytes": "Bytes of the entries that wait to be sent to the tier.",
    "skips_lookups": "1 while the tier is not asked because its look-ups fail, otherwise 0.",
    "skips_waiting": "1 while no client waits for the tier because its look-ups are late, "
    "otherwise 0.",
    "skips_reads": "1 while the tier is not asked because its reads fail, otherwise 0.",
    "skips_writes": "1 while nothing is sent to the tier because its writes fail, otherwise 0.",
}


def create_app(
    store: AsyncStore, *, interval_s: float, api_key: str = "", longest_s: float = LONGEST_S
) -> web.Application:
    """Create the service as an aiohttp application.

    Args:
        store: the store; closed with the application.
        interval_s: seconds between two checks of the quota.
        api_key: bearer token that all paths but `/health` require; empty for none.
        longest_s: as `LONGEST_S`.
    """
    app = web.Application(middlewares=[_render_errors, _require_key])
    app[STORE] = store
    app[MAINTENANCE] = Maintenance(store, interval_s, longest_s)
    app[API_KEY] = api_key
    app.cleanup_ctx.append(_housekeeping)
    app.router.add_get("/health", _health)
    app.router.add_get("/metrics", _metrics)
    return app


async def _housekeeping(app: web.Application) -> AsyncIterator[None]:
    task = asyncio.create_task(app[MAINTENANCE].run())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await app[STORE].close()


class Maintenance:
    """Periodic eviction and a daily sweep, which continue after any error."""

    def __init__(self, store: AsyncStore, interval_s: float, longest_s: float) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # its descriptors, memory and CPU time
        self._store = store
        self._interval_s = interval_s
        self._longest_s = longest_s
        self._began_s = time.monotonic()
        self._succeeded_s: float | None = None
        self._failing = False
        self._seconds = Histogram(
            "ec_store_maintenance_seconds",
            "Duration of one check of the quota in seconds, with its evictions and sweeps.",
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self._evictions = Histogram(
            "ec_store_eviction_seconds",
            "Duration of one eviction of entries above the quota in seconds, by this service.",
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self._failures = Counter(
            "ec_store_maintenance_failures",
            "Failed checks of the quota. Entries are then not evicted ahead of writers.",
            registry=self.registry,
        )
        self._last = Gauge(
            "ec_store_maintenance_last_success_timestamp_seconds",
            "Unix time of the last successful check of the quota; 0 before the first.",
            registry=self.registry,
        )

    @property
    def age_s(self) -> float | None:
        """Return the seconds since the last success; None before the first."""
        return None if self._succeeded_s is None else time.monotonic() - self._succeeded_s

    @property
    def is_late(self) -> bool:
        """Return whether nothing keeps the store within its quota any more."""
        late_s = LATE_INTERVALS * self._interval_s
        limit_s = late_s if self._failing else max(late_s, self._longest_s)
        return time.monotonic() - (self._succeeded_s or self._began_s) > limit_s

    async def run(self) -> None:
        """Run the maintenance until this task is cancelled."""
        while True:
            await self._sweep_once()
            await asyncio.sleep(self._interval_s)

    async def _sweep_once(self) -> None:
        try:
            with self._seconds.time():
                await self._store.sweep(SWEEP_EVERY_S)
        except Exception:  # the loop must go on: without it the store would fill up
            self._failures.inc()
            # Logged once until it succeeds again: a store may be down for many intervals.
            if not self._failing:
                logger.exception(
                    "maintenance of the encoder store failed; retrying at each interval"
                )
            self._failing = True
        else:
            self._failing = False
            self._succeeded_s = time.monotonic()
            self._last.set_to_current_time()
        for seconds in self._store.counts.take_observations().get("eviction_seconds", ()):
            self._evictions.observe(seconds)


MAINTENANCE = web.AppKey("maintenance", Maintenance)


@web.middleware
async def _render_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _json({"error": error.reason}, error.status)
    except StoreUnavailable as error:
        return _json({"error": str(error)}, 503)


@web.middleware
async def _require_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    key = request.app[API_KEY]
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if key and request.path not in OPEN_PATHS and not is_key(key, given):
        raise web.HTTPUnauthorized
    return await handler(request)


async def _health(request: web.Request) -> web.Response:
    """Return 503 if the store cannot be reached, or its maintenance fails or hangs.

    A lookup in a directory that is gone is only a miss, but its maintenance fails.
    """
    await request.app[STORE].lookup([EntryKey("", "health")])
    maintenance = request.app[MAINTENANCE]
    status, code = ("late", 503) if maintenance.is_late else ("healthy", 200)
    return _json({"status": status, "maintenance_age_s": maintenance.age_s}, code)


async def _metrics(request: web.Request) -> web.Response:
    """Return the metrics; without those of the store while it is unavailable.

    Those of the maintenance show that it fails.
    """
    body = generate_latest(request.app[MAINTENANCE].registry)
    with suppress(StoreUnavailable):
        body = generate_latest(_StatsCollector(await request.app[STORE].stats())) + body
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


class _StatsCollector(Collector):
    def __init__(self, stats: StoreStats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        for name, text in GAUGES.items():
            if (value := getattr(self._stats, name)) is not None:  # a backend may not provide all
                yield GaugeMetricFamily(f"ec_store_{name}", text, value=value)
        for name, text in COUNTERS.items():
            value = getattr(self._stats, name)
            yield CounterMetricFamily(f"ec_store_{name}", text, value=value)
        if self._stats.tiers:
            yield from _tier_metrics(self._stats.tiers)
        if self._stats.memory is not None:
            yield from _memory_metrics(self._stats.memory)


def _tier_metrics(tiers: Mapping[str, Mapping[str, int]]) -> Iterator[Metric]:
    """Yield a metric for each number of a tier, with a value for each tier."""
    kinds = ((CounterMetricFamily, TIER_COUNTERS), (GaugeMetricFamily, TIER_GAUGES))
    for kind, texts in kinds:
        for name, text in texts.items():
            metric = kind(f"ec_store_tier_{name}", text, labels=["tier"])
            for tier, numbers in tiers.items():
                metric.add_metric([tier], numbers[name])
            yield metric


def _memory_metrics(memory: MemoryStats) -> Iterator[Metric]:
    for name, text in MEMORY_GAUGES.items():
        yield GaugeMetricFamily(f"ec_store_{name}", text, value=getattr(memory, name))
    text = "Age of the oldest pin in seconds; 0 without pins."
    yield GaugeMetricFamily("ec_store_oldest_pin_seconds", text, value=memory.oldest_pin_s)
    text = "Writes that found no room, because all entries were pinned, leased or being written."
    yield CounterMetricFamily("ec_store_refused_writes", text, value=memory.refused)
    text = (
        "Encode seconds of entries that were read from the memory, but for the first read of each. "
        "Only of entries with a measured encode."
    )
    yield CounterMetricFamily("ec_store_saved_encode_seconds", text, value=memory.saved_s)
    text = "1; its label `pages` is the kind of the memory's pages."
    pages = GaugeMetricFamily("ec_store_memory_info", text, labels=["pages"])
    pages.add_metric([memory.pages], 1)
    yield pages
    text = (
        "Bytes that a process has pinned, by its PID and role; pid 0: the processes in PID "
        "namespaces that the server does not see. Only of processes that hold anything."
    )
    uses = GaugeMetricFamily("ec_store_client_pinned_bytes", text, labels=["pid", "role"])
    for use in memory.uses:
        uses.add_metric([str(use.pid), use.role], use.pinned_bytes)
    yield uses


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")
