"""Ledger of a shared directory's usage: no put has to count the files."""

import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from functools import lru_cache
from typing import NamedTuple

import xxhash

from ec_store.counts import ForkLock, after_fork
from ec_store.disk.files import Folder, create_locked, is_unlocked

IDLE_S = 3600.0
"""Seconds without a write after which a process counts as ended, and its line is merged."""

KNOWN_LINES = 4096
"""Parsed lines that are cached, some 2 MB: each put adds up all lines, and changes only one. With
more lines than this, each is parsed each time."""

WRITER_DIGITS = 8
"""Digits of a writer's name in the names of its staging files, which other digits complete."""

_LINE = re.compile(
    r"((?P<writer>[0-9a-f]{16})\.([0-9a-f]{1,15})\.([0-9a-f]{1,15})\.([0-9a-f]{1,15})\."
    r"([0-9a-f]{1,15}))\.(?P<digest>[0-9a-f]{8})"
)


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes and entries charged and released since the store was created."""

    charged_bytes: int = 0
    charged: int = 0
    released_bytes: int = 0
    released: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.charged_bytes + other.charged_bytes,
            self.charged + other.charged,
            self.released_bytes + other.released_bytes,
            self.released + other.released,
        )

    def common(self, other: "Usage") -> "Usage":
        """Return the smaller value of each field."""
        return Usage(*map(min, astuple(self), astuple(other)))

    @property
    def changes(self) -> int:
        return self.charged + self.released

    @property
    def bytes(self) -> int:
        return self.charged_bytes - self.released_bytes

    @property
    def entries(self) -> int:
        return self.charged - self.released

    @property
    def mean_bytes(self) -> int:
        return self.bytes // max(1, self.entries)


@dataclass(slots=True)
class Count:
    """Count of all files, which takes a while: other processes write and remove meanwhile.

    Attributes:
        before: sum of the ledger at the start of the count.
        least_bytes, least: size and number of the files that were certainly there and charged.
        most_bytes, most: the same with the unsure files, and without those that this process has
            removed and released since.
        unread: errors of files and folders that could not be counted.
        cleared_bytes, cleared: size and number of the leftovers of crashes that were removed during
            the count.
        ended_early: whether the lock was lost, or could not be read, before all files were counted.
    """

    before: Usage
    least_bytes: int = 0
    least: int = 0
    most_bytes: int = 0
    most: int = 0
    unread: list[OSError] = field(default_factory=list)
    cleared_bytes: int = 0
    cleared: int = 0
    ended_early: bool = False

    def add(self, size_bytes: int) -> None:
        self.least_bytes += size_bytes
        self.least += 1
        self.add_unsure(size_bytes)

    def add_unsure(self, size_bytes: int) -> None:
        """Count a new staging file: it may not be charged, or be seen under its final name too."""
        self.most_bytes += size_bytes
        self.most += 1

    def remove(self, size_bytes: int) -> None:
        """Record that a counted file was removed and released."""
        self.most_bytes -= size_bytes
        self.most -= 1

    def clear(self, size_bytes: int) -> None:
        """Record that a counted leftover of a crash was removed and released."""
        self.remove(size_bytes)
        self.cleared_bytes += size_bytes
        self.cleared += 1

    def correction(self, after: Usage) -> Usage:
        """Return the part of the ledger's error that is certain.

        A file that came or went during the count may have been seen or not. So the number of files
        at the start is at least the certain number less those that came, and at most the largest
        number plus those that were removed. The ledger is wrong by at least its distance from that
        range. `after` is the sum of the ledger at the end of the count.
        """
        size = _clamp_change(
            self.before.bytes,
            self.least_bytes - (after.charged_bytes - self.before.charged_bytes),
            self.most_bytes + after.released_bytes - self.before.released_bytes,
        )
        number = _clamp_change(
            self.before.entries,
            self.least - (after.charged - self.before.charged),
            self.most + after.released - self.before.released,
        )
        charged = Usage(max(0, size), max(0, number))
        if self.unread:  # files that cannot be read still take room
            return charged
        return charged + Usage(released_bytes=max(0, -size), released=max(0, -number))


class _OwnLine(NamedTuple):
    """Line of this process.

    Attributes:
        name: name of its file.
        usage: sums in the name.
        held: file that is locked while this process lives; None on a file server.
    """

    name: str
    usage: Usage
    held: Folder | None

    @property
    def writer(self) -> str:
        return self.name.partition(".")[0]


class Ledger:
    """Usage ledger of one empty file for each process, with the sums of the process in its name.

    The usage is the sum of the names: one listing, for any number of writers, and without a lock.
    Only its own process renames a file, so no change is lost, and no reader sees half of one. A
    process charges an entry before it appears, and releases it after it is gone. A process that
    dies in between leaves the sum too high until the next count of the files corrects it.
    """

    def __init__(self) -> None:
        self._lock = ForkLock()
        self._begin()
        after_fork(self._begin)

    def _begin(self) -> None:
        """Start a new line: after a fork, the present line is the parent's."""
        self._unwritten = Usage()
        # One object, set after its file is locked: other threads read it without the mutex.
        self._line: _OwnLine | None = None

    def writer(self, folder: Folder) -> str:
        """Return the name of this process for `DeadWriters`; that of no process without a lock."""
        if self._line is None:
            with suppress(OSError):  # an eviction frees the room for a line
                self.add(folder, Usage())
        line = self._line
        return line.writer[:WRITER_DIGITS] if line and line.held else "0" * WRITER_DIGITS

    def charge(self, folder: Folder, size_bytes: int, entries: int = 1) -> None:
        """Charge an entry before it appears."""
        self.add(folder, Usage(charged_bytes=size_bytes, charged=entries))

    def release(self, folder: Folder, size_bytes: int, entries: int = 1) -> None:
        """Release an entry after it is gone; without room for the change, with the next one."""
        self._add_gone(folder, Usage(released_bytes=size_bytes, released=entries))

    def add(self, folder: Folder, change: Usage) -> None:
        """Add charges and releases. If it raises OSError, nothing was added."""
        with self._lock.mutex:
            change += self._unwritten
            line = self._line and self._renamed(folder, self._line, change)
            if line is None:
                # The first change, or the line was merged into another process's: start a new line.
                name = _line(secrets.token_hex(8), change)
                line = _OwnLine(name, change, create_locked(folder, name))
            self._line, self._unwritten = line, Usage()

    def _add_gone(self, folder: Folder, change: Usage) -> None:
        """Add what no file shows any more: if it cannot be written, with the next change.

        Until then only this process counts it.
        """
        try:
            self.add(folder, change)
        except OSError:
            with self._lock.mutex:
                self._unwritten += change

    @staticmethod
    def _renamed(folder: Folder, line: _OwnLine, change: Usage) -> _OwnLine | None:
        """Add a change to a line, and return it; None if the line is gone."""
        usage = line.usage + change
        name = _line(line.writer, usage)
        try:
            folder.rename(line.name, name)
        except FileNotFoundError:
            # An NFS client repeats a call if the reply is lost: the first one may have renamed it.
            if not folder.has(name):
                return None
        return _OwnLine(name, usage, line.held)

    def total(self, folder: Folder) -> Usage:
        """Return the sum of all processes' charges and releases.

        One listing may skip lines that are renamed meanwhile: the sum is then wrong by all that
        their processes have written and removed.
        """
        usages = (self._unwritten, *_lines(folder).values())
        return Usage(
            sum(usage.charged_bytes for usage in usages),
            sum(usage.charged for usage in usages),
            sum(usage.released_bytes for usage in usages),
            sum(usage.released for usage in usages),
        )

    def merge(self, folder: Folder, now_s: float) -> None:
        """Take over the lines of ended processes, and remove files with invalid names."""
        for name in folder.names():
            with suppress(OSError):
                # The time of the last rename; the content of the file never changes.
                own = self._line and self._line.name
                if name == own or now_s - folder.stat(name).st_ctime <= IDLE_S:
                    continue
                # If its process has renamed it meanwhile, `remove` returns False, and the line
                # stays.
                if folder.remove(name) and (line := _read(name)):
                    self._add_gone(folder, line[1])


class DeadWriters:
    """Test for the processes that have died, as of one moment.

    Each process locks its line. The line of a dead one stays for `IDLE_S`, and identifies its
    leftovers for that long.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._lines: dict[str, str] | None = None
        self._dead: dict[str, bool] = {}

    def __contains__(self, writer: str) -> bool:
        if self._lines is None:
            names = self._folder.names() if self._folder.is_local else []
            self._lines = {name[:WRITER_DIGITS]: name for name in names}
        if writer not in self._dead:
            line = self._lines.get(writer)
            self._dead[writer] = line is not None and is_unlocked(self._folder, line)
        return self._dead[writer]


def _line(writer: str, usage: Usage) -> str:
    charged = f"{usage.charged_bytes:x}.{usage.charged:x}"
    text = f"{writer}.{charged}.{usage.released_bytes:x}.{usage.released:x}"
    return f"{text}.{xxhash.xxh32_hexdigest(text.encode())}"


@lru_cache(KNOWN_LINES)
def _read(name: str) -> tuple[str, Usage] | None:
    """Return the writer and the usage in a line; None if the name is not a valid line."""
    match = _LINE.fullmatch(name)
    if match is None or xxhash.xxh32_hexdigest(match[1].encode()) != match["digest"]:
        return None
    return match["writer"], Usage(*(int(match[group], 16) for group in range(3, 7)))


def _lines(folder: Folder) -> Mapping[str, Usage]:
    lines: dict[str, Usage] = {}
    for name in folder.names():
        if line := _read(name):
            writer, usage = line
            known = lines.get(writer)
            # A line that is renamed during the listing may be seen twice: the later one counts.
            if known is None or known.changes < usage.changes:
                lines[writer] = usage
    return lines


def _clamp_change(value: int, low: int, high: int) -> int:
    """Return the change that brings a value into a range; 0 for a value inside it."""
    return max(0, low - value) + min(0, high - value)
