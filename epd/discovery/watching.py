"""The watched sources: a file of instances, names in the DNS."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import orjson

from epd.discovery.dns import DnsState, LookUp, LookUpFailed
from epd.discovery.entries import EntriesInvalid, read_yaml
from epd.json_or_none import json_or_none
from epd.routing.instances import Instance
from epd.routing.registry import InstanceSource, Registry
from epd.routing.urls import at_address
from epd.shared_page import PageUnreadable, SharedPage
from epd.state_log import StateLog
from epd.transfer.kv import KVTransfer
from epd.upstream import Upstream

LOOK_UP_S = 5.0
"""Interval of looking up the names, in seconds."""

FILE_POLL_S = 0.5
"""Interval of reading the file. New content must be read twice, because it may be half written."""

MAX_BYTES = 1024**2
"""Maximum size of a file. A larger one was written by other software."""


class Watch(Protocol):
    """A source that is polled."""

    interval_s: float

    async def look(self) -> None:
        """Take over what the source has now; keep what is known if it is unavailable."""


class WatchedFile:
    """A file of instances, in the format of `epd.discovery.entries.read_yaml`."""

    def __init__(self, path: Path, registry: Registry, last: SharedPage | None = None) -> None:
        """Watch a file. `last` keeps its last valid content for the workers that start later."""
        self.interval_s = FILE_POLL_S
        self._last = last
        self._path = path
        self._registry = registry
        self._first = True
        self._seen: bytes | None = None
        self._taken: bytes | None = None
        self._complaint = StateLog("the file of instances cannot be used", path=str(path))

    async def look(self) -> None:
        first, self._first = self._first, False
        if first and (last := _kept(self._last)):
            self._registry.replace(InstanceSource.FILE, read_yaml(last))
        try:
            raw = await asyncio.to_thread(read_file, self._path)
        except OSError as error:
            self._complaint.record_failure(error.strerror or str(error))
            return
        seen, self._seen = self._seen, raw
        if raw is None:
            self._complaint.record_failure("the file does not exist")
        elif raw == self._taken:
            self._complaint.record_success()
        elif raw == seen or first:
            self._take(raw)

    def _take(self, raw: bytes) -> None:
        try:
            instances = read_yaml(raw)
        except EntriesInvalid as error:
            self._complaint.record_failure(str(error))
            return
        self._complaint.record_success()
        self._taken = raw
        self._registry.replace(InstanceSource.FILE, instances)
        _keep(self._last, raw)


def read_file(path: Path) -> bytes | None:
    """Return the content of a small file; None if it does not exist.

    Raises:
        OSError: the file cannot be read, or is too large.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(content) > MAX_BYTES:
        raise OSError(f"{path.name} has more than {MAX_BYTES} bytes")
    return content


def check_file(path: Path, transfer: KVTransfer) -> None:
    """Reject a file with which a proxy cannot start.

    Raises:
        EntriesInvalid: the file is missing or invalid, or the KV transfer rejects an instance.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise EntriesInvalid(error.strerror or type(error).__name__) from None
    for instance in read_yaml(raw):
        try:
            transfer.check(instance)
        except ValueError as error:
            raise EntriesInvalid(f"{instance.url}: {error}") from None


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
        self._complaints = {
            host: StateLog("a name cannot be looked up", name=host) for host in hosts
        }

    async def look(self) -> None:
        if self._first:
            self._first = False
            known = json_or_none(_kept(self._last)) or {}
            for host in self._sightings.keys() & known.keys():
                self._sightings[host].record_addresses(known[host], _now_s())
        before = self._current()
        await asyncio.gather(*map(self._look_up, self._sightings))
        if (current := self._current()) != before:
            _keep(self._last, orjson.dumps(current))
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


def _keep(page: SharedPage | None, content: bytes) -> None:
    """Keep a source's last answer, unless another worker is doing that at the moment."""
    if page is not None:
        with suppress(OSError), page.hold_lock():
            page.write(content)


def _kept(page: SharedPage | None) -> bytes:
    if page is not None:
        with suppress(OSError, PageUnreadable):
            return page.read() or b""
    return b""
