"""File of instances, read at an interval."""

import asyncio
from pathlib import Path

from epd.discovery.entries import EntriesInvalid, read_yaml
from epd.discovery.watching import last_answer, write_last_answer
from epd.routing.registry import InstanceSource, Registry
from epd.shared_page import SharedPage
from epd.state_log import StateLog
from epd.transfer.kv import KVTransfer

FILE_POLL_S = 0.5
"""Interval of reading the file. New content must be read twice, because it may be half written."""

MAX_BYTES = 1024**2
"""Maximum size of a file. A larger one was written by other software."""


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
        self._complaint = StateLog("the file of instances", path=str(path))

    async def look(self) -> None:
        first, self._first = self._first, False
        if first and (last := last_answer(self._last)):
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
        write_last_answer(self._last, raw)


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
