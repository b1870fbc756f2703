"""Known content of prefix caches, kept precise by the KV events of their engines.

This module needs the extra `kv-events`.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from epd.aio import Background
from epd.config.sections import ConfigFields
from epd.kv_events.addresses import event_endpoints
from epd.kv_events.feed import EMPTIED, FeedReport
from epd.kv_events.reader import EventReader, FeedKey, Reports
from epd.routing.instances import Instance, Role
from epd.routing.table import InstanceTable
from epd.state_log import StateLog

STOP_S = 1.0
"""Time limit for the end of the thread, in seconds."""

TICK_S = 0.5
"""Interval in which the subscriptions are compared with the instances."""


class KVEvents:
    """The known content of prefix caches, kept up to date by the events of their engines."""

    def __init__(self, table: InstanceTable, config: ConfigFields) -> None:
        self._table = table
        self._config = config
        self._logs: dict[FeedKey, StateLog] = {}
        self._instances: dict[tuple[Role, str], Instance] = {}
        self._counts: dict[tuple[Role, str], Counter[str]] = {}

    @asynccontextmanager
    async def run_events(
        self, background: Background
    ) -> AsyncIterator[Callable[[], Mapping[tuple[Role, str], Mapping[str, int]]]]:
        """Follow the events in the background until the context exits. Yield their counts."""
        async with background.run_task("kv_events", self._run):
            yield lambda: self._counts

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()

        def record(reports: Reports) -> None:
            reader.taken.set()
            for key, report in reports:
                self._record_report(key, report)

        reader = EventReader(lambda reports: loop.call_soon_threadsafe(record, reports))
        reader.start()
        try:
            while reader.is_alive():
                reader.endpoints = self._endpoints()
                await asyncio.sleep(TICK_S)
            raise RuntimeError("the thread that reads KV events has ended")
        finally:
            reader.stopped.set()
            for candidate in self._table.all(*self._config.content_roles):
                for cache in candidate.load.caches:
                    cache.estimate_reported()
            # Bounded: the interpreter waits for the thread of this call when it exits.
            await asyncio.to_thread(reader.join, STOP_S)

    def _endpoints(self) -> dict[FeedKey, str]:
        config = self._config
        self._instances = {
            instance.key: instance for instance in self._table.of_roles(*config.content_roles)
        }
        self._counts = {key: self._counts.get(key, Counter()) for key in self._instances}
        endpoints = {
            (key, rank): endpoint
            for key, instance in self._instances.items()
            for rank, endpoint in enumerate(event_endpoints(instance, config.kv_events_addrs))
        }
        self._logs = {key: log for key, log in self._logs.items() if key in endpoints}
        return endpoints

    def _record_report(self, key: FeedKey, report: FeedReport) -> None:
        instance, rank = key
        try:
            cache = self._table.load(self._instances[instance]).cache_of(rank)
        except KeyError:  # the instance has been removed
            return
        self._counts[instance].update(report.counts)
        log = self._logs.get(key)
        if log is None:
            log = self._logs[key] = StateLog(
                "the KV events of an engine",
                "its prefix cache is estimated",
                instance=instance[1],
                rank=str(rank),
            )
        if report.fault in EMPTIED:
            cache.clear()
        elif report.fault:
            cache.estimate_reported()
            log.record_failure(report.fault)
        cache.apply_changes(report.changes)
        if cache.precise:
            log.record_success()
