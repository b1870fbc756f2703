"""The watched sources: a file of instances, names in the DNS.

Each stores its last good answer, for a process that starts while the source is unavailable.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import orjson

from epd.discovery.dns import DnsState, LookUp, LookUpFailed
from epd.discovery.entries import EntriesInvalid, read_yaml
from epd.discovery.stores import LockedFolder, read_file
from epd.json_or_none import json_or_none
from epd.routing.instances import Instance
from epd.routing.registry import InstanceSource, Registry
from epd.routing.urls import at_address, is_address
from epd.state_log import StateLog
from epd.transfer.kv import KVTransfer
from epd.upstream import Upstream

FILE_POLL_S = 0.5
"""Interval of reading the file. New content must be read twice, because it may be half written."""

LAST_FILE, LAST_NAMES = "last-file.yaml", "last-names.json"
"""Names of the files in a shared folder with the last good content."""


class StoredAnswers:
    """Storage of the last good answers: a folder, or none. Its failures are ignored."""

    def __init__(self, folder: LockedFolder | None) -> None:
        self._folder = folder

    async def store_content(self, name: str, content: bytes) -> None:
        if self._folder is not None:
            with suppress(OSError):
                await asyncio.to_thread(self._folder.write, name, content)

    async def recall_content(self, name: str) -> bytes | None:
        if self._folder is not None:
            with suppress(OSError):
                return await asyncio.to_thread(self._folder.read, name)
        return None


class Watch(Protocol):
    """A source that is polled."""

    async def begin_poll(self) -> None:
        """Poll for the first time; use the stored answer if the source is unavailable."""

    async def poll_periodically(self) -> None:
        """Poll while the proxy runs."""


class WatchedFile:
    """A file of instances, in the format of `epd.discovery.entries.read_yaml`."""

    def __init__(self, path: Path, registry: Registry, memory: StoredAnswers) -> None:
        self._path = path
        self._registry = registry
        self._memory = memory
        self._seen: bytes | None = None
        self._taken: bytes | None = None
        self._complaint = StateLog("the file of instances cannot be used", path=str(path))

    async def begin_poll(self) -> None:
        await self._look(at_once=True)
        if (
            self._taken is None
            and (last := await self._memory.recall_content(LAST_FILE)) is not None
        ):
            with suppress(EntriesInvalid):
                self._registry.replace(InstanceSource.FILE, read_yaml(last))

    async def poll_periodically(self) -> None:
        while True:
            await asyncio.sleep(FILE_POLL_S)
            await self._look()

    async def _look(self, *, at_once: bool = False) -> None:
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
        elif raw == seen or at_once:
            await self._take(raw)

    async def _take(self, raw: bytes) -> None:
        try:
            instances = read_yaml(raw)
        except EntriesInvalid as error:
            self._complaint.record_failure(str(error))
            return
        self._complaint.record_success()
        self._taken = raw
        self._registry.replace(InstanceSource.FILE, instances)
        await self._memory.store_content(LAST_FILE, raw)


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
    certificate name of each address. `memory` has the last good answers.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - its collaborators
        self,
        services: Iterable[Instance],
        look_up: LookUp,
        interval_s: float,
        registry: Registry,
        upstream: Upstream,
        memory: StoredAnswers,
    ) -> None:
        self._services = [(service, urlsplit(service.url).hostname or "") for service in services]
        self._addresses = look_up
        self._interval_s = interval_s
        self._registry = registry
        self._upstream = upstream
        self._memory = memory
        hosts = dict.fromkeys(host for _, host in self._services)
        self._sightings = {host: DnsState() for host in hosts}
        self._complaints = {
            host: StateLog("a name cannot be looked up", name=host) for host in hosts
        }

    async def begin_poll(self) -> None:
        last = _addresses(await self._memory.recall_content(LAST_NAMES))
        now_s = asyncio.get_running_loop().time()
        for host, sighting in self._sightings.items():
            sighting.record_addresses(last.get(host, ()), now_s)
        await self._look()

    async def poll_periodically(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._look()

    async def _look(self) -> None:
        before = self._current()
        await asyncio.gather(*map(self._look_up, self._sightings))
        current = self._current()
        found = [
            (replace(service, url=at_address(service.url, address)), host)
            for service, host in self._services
            for address in sorted(current[host])
        ]
        self._upstream.verify_as({instance.url: host for instance, host in found})
        self._registry.replace(InstanceSource.DNS, [instance for instance, _ in found])
        if current != before:
            held = {host: sorted(addresses) for host, addresses in current.items()}
            await self._memory.store_content(LAST_NAMES, orjson.dumps(held))

    async def _look_up(self, host: str) -> None:
        sighting, complaint = self._sightings[host], self._complaints[host]
        try:
            addresses = await self._addresses(host)
        except LookUpFailed as error:
            sighting.record_failure()
            complaint.record_failure(str(error))
            return
        sighting.record_addresses(addresses, asyncio.get_running_loop().time())
        if addresses:
            complaint.record_success()
        else:
            complaint.record_failure("the name has no address")

    def _current(self) -> Mapping[str, frozenset[str]]:
        return {host: sighting.current for host, sighting in self._sightings.items()}


def _addresses(remembered: bytes | None) -> Mapping[str, Collection[str]]:
    held = json_or_none(remembered or b"")
    if not isinstance(held, dict):
        return {}
    return {
        host: [address for address in found if isinstance(address, str) and is_address(address)]
        for host, found in held.items()
        if isinstance(found, list)
    }
