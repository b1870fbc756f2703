"""How full a shared directory is, without counting it at every put."""

import os
import re
import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import xxhash

from ec_store.files import Folder

IDLE_S = 3600.0
"""A process that wrote nothing for so long is taken for gone, and its line is merged."""

_LINE = re.compile(
    r"((?P<writer>[0-9a-f]{16})\.([0-9a-f]{1,15})\.([0-9a-f]{1,15})\.([0-9a-f]{1,15})\."
    r"([0-9a-f]{1,15}))\.(?P<digest>[0-9a-f]{8})"
)


@dataclass(frozen=True, slots=True)
class Usage:
    """What was charged and released since the store began, in bytes and entries."""

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

    @property
    def bytes(self) -> int:
        """What is in use."""
        return self.charged_bytes - self.released_bytes

    @property
    def entries(self) -> int:
        """How many entries there are."""
        return self.charged - self.released


@dataclass(slots=True)
class Count:
    """A count of all files, which takes a while: others write and remove meanwhile.

    Attributes:
        before: the sum of the ledger when it began.
        bytes, entries: what was seen, with what was removed in the course of it.
        removed_bytes, removed: of these, what this process removed and released itself.
    """

    before: Usage
    bytes: int = 0
    entries: int = 0
    removed_bytes: int = 0
    removed: int = 0

    def add(self, size_bytes: int) -> None:
        """Count a file."""
        self.bytes += size_bytes
        self.entries += 1

    def remove(self, size_bytes: int, entries: int = 1) -> None:
        """Say that files that were counted are removed and released."""
        self.removed_bytes += size_bytes
        self.removed += entries

    def correction(self, after: Usage) -> Usage:
        """What the ledger lacks, or has too much, for certain.

        A file that came or went meanwhile may have been seen or not. So the files there were at the
        beginning are as many as were seen, less at most what came, and more at most what others
        removed; the ledger is wrong by no less than its distance from that range.

        Args:
            after: the sum of the ledger when the count ended.
        """
        size = _beyond(
            self.before.bytes,
            self.bytes - (after.charged_bytes - self.before.charged_bytes),
            self.bytes + after.released_bytes - self.before.released_bytes - self.removed_bytes,
        )
        number = _beyond(
            self.before.entries,
            self.entries - (after.charged - self.before.charged),
            self.entries + after.released - self.before.released - self.removed,
        )
        return Usage(max(0, size), max(0, number), max(0, -size), max(0, -number))


class Ledger:
    """One empty file for each process, whose name says what it charged and released in all.

    The sum of the names is the usage: one listing, however many processes write, and no lock. Only
    its process renames a file, so that no change is lost, and none is read in halves. A process
    charges before an entry appears and releases after one went: one that dies in between leaves the
    sum too high, until the next count of the files corrects it.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._writer = secrets.token_hex(8)
        self._own = Usage()
        self._name = ""
        self._lock = threading.Lock()

    def renew_locks(self) -> None:
        """Begin a line of its own, in a child of `fork`: the present one is the parent's."""
        self._begin()

    def charge(self, folder: Folder, size_bytes: int, entries: int = 1) -> None:
        """Count an entry that will appear."""
        self.add(folder, Usage(charged_bytes=size_bytes, charged=entries))

    def release(self, folder: Folder, size_bytes: int, entries: int = 1) -> None:
        """Count an entry that is gone."""
        self.add(folder, Usage(released_bytes=size_bytes, released=entries))

    def add(self, folder: Folder, change: Usage) -> None:
        """Count both. Raises OSError, and then nothing is counted."""
        with self._lock:
            own = self._own + change
            name = _line(self._writer, own)
            if not self._name or not self._renamed(folder, name):
                # The first change, or the line was merged into another's: it begins again.
                own, self._writer = change, secrets.token_hex(8)
                name = _line(self._writer, own)
                os.close(folder.create(name))
            self._own, self._name = own, name

    def _renamed(self, folder: Folder, name: str) -> bool:
        try:
            folder.rename(self._name, name)
        except FileNotFoundError:
            # An NFS client repeats a call whose answer was lost: it may be renamed already.
            return folder.has(name)
        return True

    def total(self, folder: Folder) -> Usage:
        """What all processes charged and released."""
        return sum(_lines(folder).values(), Usage())

    def empty(self, folder: Folder) -> bool:
        """Whether it says nothing: of a new store, or of one whose files have to be counted."""
        return not _lines(folder)

    def merge(self, folder: Folder, now_s: float) -> None:
        """Take over the lines of processes that are gone, and remove what is no line."""
        for name in folder.names():
            with suppress(OSError):
                # The time of the last renaming; the file itself never changes.
                if name == self._name or now_s - folder.stat(name).st_ctime <= IDLE_S:
                    continue
                # Where its process renamed it meanwhile, it is not removed, and not taken over.
                if folder.remove(name) and (line := _read(name)):
                    self.add(folder, line[1])


def _line(writer: str, usage: Usage) -> str:
    figures = f"{usage.charged_bytes:x}.{usage.charged:x}.{usage.released_bytes:x}"
    text = f"{writer}.{figures}.{usage.released:x}"
    return f"{text}.{xxhash.xxh32_hexdigest(text.encode())}"


def _read(name: str) -> tuple[str, Usage] | None:
    """Whose line it is, and what it says; None where the name is no line."""
    match = _LINE.fullmatch(name)
    if match is None or xxhash.xxh32_hexdigest(match[1].encode()) != match["digest"]:
        return None
    return match["writer"], Usage(*(int(match[group], 16) for group in range(3, 7)))


def _lines(folder: Folder) -> Mapping[str, Usage]:
    lines: dict[str, Usage] = {}
    for name in folder.names():
        if line := _read(name):
            writer, usage = line
            # One that was renamed while it was listed may be seen twice: the later one is right.
            known = lines.get(writer, usage)
            lines[writer] = max(usage, known, key=lambda one: one.charged + one.released)
    return lines


def _beyond(value: int, low: int, high: int) -> int:
    """How far a value has to go to be in a range."""
    return max(0, low - value) + min(0, high - value)
