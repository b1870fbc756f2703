"""Names in the DNS, looked up at an interval: each address is an instance."""

import asyncio
import math
from collections.abc import Collection, Iterable
from dataclasses import replace
from urllib.parse import urlsplit

import orjson

from epd.discovery.dns import LookUp, LookUpFailed
from epd.discovery.watching import last_answer, write_last_answer
from epd.json_or_none import json_or_none
from epd.routing.instances import Instance
from epd.routing.registry import InstanceSource, Registry
from epd.routing.urls import at_address
from epd.shared_page import SharedPage
from epd.state_log import StateLog
from epd.upstream import Upstream

LOOK_UP_S = 5.0
"""Interval of looking up the names, in seconds."""

EMPTY_S = 60.0
"""Time for which a name must have no address before its last addresses are dropped, in seconds."""


class DnsState:
    """The effective addresses of one name.

    A failing resolver says nothing about the instances: their addresses stay. An empty answer may
    be true, as after scaling to zero, and takes effect after a delay.
    """

    def __init__(self) -> None:
        self.current: frozenset[str] = frozenset()
        self._empty_since_s = math.inf

    def record_addresses(self, addresses: Collection[str], now_s: float) -> None:
        if addresses:
            self.current = frozenset(addresses)
            self._empty_since_s = math.inf
            return
        self._empty_since_s = min(self._empty_since_s, now_s)
        if now_s - self._empty_since_s >= EMPTY_S:
            self.current = frozenset()

    def record_failure(self) -> None:
        self._empty_since_s = math.inf


class WatchedNames:
    """Names in the DNS, each address of which is an instance.

    The URLs of the discovered services have the names as hosts. The client receives the expected
    certificate name of each address.
    """

    def __init__(
        self,
        services: Iterable[Instance],
        look_up: LookUp,
        registry: Registry,
        upstream: Upstream,
        last: SharedPage | None = None,
    ) -> None:
        """Watch names. `last` keeps their addresses for the workers that start later."""
        self.interval_s = LOOK_UP_S
        self._last = last
        self._services = [(service, urlsplit(service.url).hostname or "") for service in services]
        self._addresses = look_up
        self._registry = registry
        self._upstream = upstream
        self._first = True
        hosts = dict.fromkeys(host for _, host in self._services)
        self._sightings = {host: DnsState() for host in hosts}
        self._complaints = {host: StateLog("a name of instances", name=host) for host in hosts}

    async def look(self) -> None:
        if self._first:
            self._first = False
            known = json_or_none(last_answer(self._last)) or {}
            for host in self._sightings.keys() & known.keys():
                self._sightings[host].record_addresses(known[host], _now_s())
        before = self._current()
        await asyncio.gather(*map(self._look_up, self._sightings))
        if (current := self._current()) != before:
            write_last_answer(self._last, orjson.dumps(current))
        found = [
            (replace(service, url=at_address(service.url, address)), host)
            for service, host in self._services
            for address in current[host]
        ]
        self._upstream.verify_as({instance.url: host for instance, host in found})
        self._registry.replace(InstanceSource.DNS, [instance for instance, _ in found])

    async def _look_up(self, host: str) -> None:
        sighting, complaint = self._sightings[host], self._complaints[host]
        try:
            addresses = await self._addresses(host)
        except LookUpFailed as error:
            sighting.record_failure()
            complaint.record_failure(str(error))
            return
        sighting.record_addresses(addresses, _now_s())
        if addresses:
            complaint.record_success()
        else:
            complaint.record_failure("the name has no address")

    def _current(self) -> dict[str, list[str]]:
        return {host: sorted(sighting.current) for host, sighting in self._sightings.items()}


def _now_s() -> float:
    return asyncio.get_running_loop().time()
