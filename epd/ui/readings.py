"""What only readers of the page need: use of the stores, and reports of engines about themselves.

It is read while a client reads the page, at intervals. Without a reader nothing is read. The page
does not wait for it, but for a moment at the first look.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from itertools import islice
from typing import Generic, Self, TypeVar
from urllib.parse import urlsplit

from ec_store.base import StoreStats
from epd.encoder_cache.client import EncoderCache
from epd.errors import ProxyError
from epd.json_or_none import json_or_none
from epd.routing.health import HealthState
from epd.routing.instances import Role
from epd.routing.table import InstanceTable
from epd.ui.engine_use import NO_USE, EngineUses
from epd.ui.state import EngineShown, Looked, StoreShown
from epd.upstream import Upstream

STORE_S = 5.0
"""Interval of reading the use of a store, in seconds."""
VERSION_S = 60.0
"""Interval of asking an instance for its version, in seconds."""
FORGET_AFTER = 3.0
"""Age of a value, in intervals, after which it is unknown."""
FIRST_S = 0.1
"""Longest wait of a look for values that were not read before it, in seconds."""
MAX_STORES = 64
"""Upper bound of the stores that are read: further hosts are not shown."""
MAX_ASKED = 32
"""Upper bound of the instances that are asked for their version at once."""
TIMEOUT_S = 2.0
"""Longest wait for an instance's version, in seconds."""
MAX_VERSION = 64
"""Upper bound of a version, in characters."""

T = TypeVar("T")


class Reading(Generic[T]):
    """A value that is read again when it is due, by one read at a time.

    Attributes:
        value: the last one read; None if it is unknown, or the reads no longer end.
        task: the last read; None before the first.
    """

    def __init__(self, read: Callable[[], Awaitable[T | None]], every_s: float) -> None:
        self.value: T | None = None
        self.task: asyncio.Task[None] | None = None
        self._read = read
        self._every_s = every_s
        self._begun_s = -math.inf

    @property
    def busy(self) -> bool:
        return self.task is not None and not self.task.done()

    def begin_if_due(self, now_s: float) -> asyncio.Task[None] | None:
        """Begin a read if it is due. Return it if the value is unknown before it ends."""
        age_s = now_s - self._begun_s
        if age_s < self._every_s:
            return None
        is_new = age_s >= FORGET_AFTER * self._every_s
        if is_new or self.busy:
            self.value = None
        if self.busy:
            return None
        self._begun_s = now_s
        self.task = asyncio.create_task(self._run())
        return self.task if is_new else None

    async def _run(self) -> None:
        value = None
        try:
            value = await self._read()
        finally:  # unknown after an unexpected exception, which asyncio logs
            self.value = value


class Readings:
    """Values of this process for the page. Belongs to one event loop."""

    def __init__(
        self,
        table: InstanceTable,
        upstream: Upstream,
        caches: Callable[[], Mapping[str, EncoderCache]],
        uses: EngineUses,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create it without values. `caches` returns the stores of now, by their names."""
        self._table = table
        self._upstream = upstream
        self._caches = caches
        self._uses = uses
        self._clock = clock
        self._stores: dict[tuple[str, int], Reading[StoreStats]] = {}
        self._versions: dict[str, Reading[str]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [reading.task for reading in self._stores.values()]
        tasks += [reading.task for reading in self._versions.values()]
        begun = [task for task in tasks if task is not None]
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)

    async def look(self) -> Looked:
        """Return the values, and begin to read those that are due."""
        now_s = self._clock()
        self._uses.look()
        caches = dict(islice(self._caches().items(), MAX_STORES))
        # A server that was closed, and is named again, has another client.
        self._stores = {
            (name, id(cache)): self._stores.get((name, id(cache))) or Reading(cache.stats, STORE_S)
            for name, cache in caches.items()
        }
        self._find_instances()
        begun = [reading.begin_if_due(now_s) for reading in self._stores.values()]
        idle = [reading for reading in self._versions.values() if not reading.busy]
        free = MAX_ASKED - len(self._versions) + len(idle)
        for reading in idle:
            if free > 0:
                begun.append(reading.begin_if_due(now_s))
                free -= reading.busy
        if first := [task for task in begun if task is not None]:
            await asyncio.wait(first, timeout=FIRST_S)
        stores = [
            _store(name, reading.value, bypassed=any(cache.open_circuits.values()))
            for (name, cache), reading in zip(caches.items(), self._stores.values(), strict=True)
        ]
        return Looked(stores, self._engines())

    def _find_instances(self) -> None:
        up = {
            instance.url
            for instance in self._table.of_roles(*Role)
            if self._table.state(instance) is not HealthState.DOWN
        }
        self._versions = {
            url: self._versions.get(url) or Reading(partial(self._version, url), VERSION_S)
            for url in up
        }

    async def _version(self, url: str) -> str | None:
        try:
            reply = await self._upstream.fetch(
                f"{url}/version", stage="proxy", headers={}, timeout_s=TIMEOUT_S
            )
        except ProxyError:
            return None
        match json_or_none(reply.body):
            case {"version": str() as version} if reply.ok:
                return version[:MAX_VERSION]
        return None

    def _engines(self) -> dict[str, EngineShown]:
        shown = {}
        for instance in self._table.of_roles(*Role):
            url, report = instance.url, self._table.load(instance).report
            version = self._versions.get(url)
            use = NO_USE if report is None else self._uses.of(url)
            shown[url] = EngineShown(
                version=None if version is None else version.value,
                waiting=None if report is None else report.waiting,
                kv_usage=use.kv_usage,
                prefix_hits=use.prefix_hits,
            )
        return shown


def _store(name: str, stats: StoreStats | None, *, bypassed: bool) -> StoreShown:
    """Return the use of a store. Evictions of other processes are known only of a memory."""
    memory = None if stats is None else stats.memory
    return StoreShown(
        name=urlsplit(name).netloc or name,
        known=stats is not None,
        bypassed=bypassed,
        entries=None if stats is None else stats.entries,
        bytes=None if stats is None else stats.bytes,
        max_bytes=None if stats is None else stats.max_bytes,
        evictions=None if stats is None or memory is None else stats.evictions,
        refused=None if memory is None else memory.refused,
    )
