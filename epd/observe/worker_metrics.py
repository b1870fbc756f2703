"""The figures of all workers, whichever of them is asked.

Each worker writes its figures to a page that the others read: every second while they are
scraped, more rarely otherwise, and before it answers.
So no figure was ever shown that is not on a page, and no counter goes back when a worker dies. A
worker that replaces another goes on counting from where that one's page ends.

Bytes that one process writes again and again, and others read: the last whole ones, always.

They are in memory that has no name, and is gone with the last process that has it open.

A number tells which of two halves is read; the other one is written, and then the number. So a
writer that is killed leaves what it wrote before. A reader that is overtaken twice finds what does
not fit the number or the digest, and looks again.

What several processes have counted, added up.

Counters and histograms are sums. The fixed order and the one rounding at the end matter: a sum that
came out a last digit smaller when another process is asked would be taken for a counter that began
anew.
"""

import asyncio
import errno
import fcntl
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from struct import Struct

import structlog
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from pydantic import TypeAdapter

from epd.observe.metric_defs import FIGURES

NUMBER = Struct("<Q")
WANTED = Struct("<d")
"""When a reader last wanted the page, on the monotonic clock of this machine; 0: never."""
HEAD = Struct("<QQ16s")
"""Of a half: its number, the length of what follows, and its digest."""

HALF_BYTES = 64 * 1024**2
"""How far the halves are apart, and what one has room for. Only what is written takes memory."""

ATTEMPTS = 100
"""Overtaken so often in a row, a reader gives up."""


class PageUnreadable(Exception):
    """There is something, but no whole page."""


class SharedPage:
    """One page. One process at a time may write it.

    Attributes:
        descriptor: hands it to another process.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def made(cls) -> "SharedPage":
        """One that nobody has written yet.

        Raises:
            OSError: there is no memory for it.
        """
        descriptor = os.memfd_create("epd")
        os.fchmod(descriptor, 0o600)
        return cls(descriptor)

    def write(self, page: bytes) -> None:
        """Have everyone read this from now on.

        Raises:
            OSError: it does not fit; what was written before stays.
        """
        number = self.number() + 1
        head = HEAD.pack(number, len(page), _digest(page))
        if len(head) + len(page) > HALF_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        self._put(head + page, _half(number))
        self._put(NUMBER.pack(number), 0)

    def read(self) -> bytes | None:
        """What was written last; None where nothing was.

        Raises:
            PageUnreadable: there is no whole page.
        """
        for _ in range(ATTEMPTS):
            number = self.number()
            if not number:
                return None
            page = self._at(number)
            if page is not None:
                return page
        raise PageUnreadable(f"page {number} is not whole")

    def number(self) -> int:
        """How often it has been written: what was read by the same number is read still."""
        found = os.pread(self.descriptor, NUMBER.size, 0)
        number: int = NUMBER.unpack(found)[0] if len(found) == NUMBER.size else 0
        return number

    def want(self) -> None:
        """Tell the page's writer that it has a reader. Any process may.

        Raises:
            OSError: there is no memory for it.
        """
        self._put(WANTED.pack(time.monotonic()), NUMBER.size)

    def wanted_within(self, seconds: float) -> bool:
        """Whether a reader has wanted it that lately."""
        found = os.pread(self.descriptor, WANTED.size, NUMBER.size)
        wanted_s: float = WANTED.unpack(found)[0] if len(found) == WANTED.size else 0.0
        return wanted_s > 0.0 and time.monotonic() - wanted_s < seconds

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only process that writes, of several that may; the lock ends with its holder.

        Raises:
            OSError: another one is.
        """
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield
        finally:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of it."""
        os.close(self.descriptor)

    def _at(self, number: int) -> bytes | None:
        head = os.pread(self.descriptor, HEAD.size, _half(number))
        if len(head) < HEAD.size:
            return None
        found, length, digest = HEAD.unpack(head)
        if found != number or length > HALF_BYTES:
            return None
        page = os.pread(self.descriptor, length, _half(number) + HEAD.size)
        return page if _digest(page) == digest else None

    def _put(self, content: bytes, at: int) -> None:
        if os.pwrite(self.descriptor, content, at) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _half(number: int) -> int:
    return HEAD.size + number % 2 * HALF_BYTES


def _digest(page: bytes) -> bytes:
    return hashlib.blake2b(page, digest_size=16).digest()


_Sample = tuple[str, dict[str, str], float]
_Values = dict[tuple[str, frozenset[tuple[str, str]]], list[float]]
_Family = tuple[str, str, str, list[_Sample]]
_PAGE = TypeAdapter(list[_Family])


def dump(families: Iterable[Metric]) -> bytes:
    """Their name, documentation, type and samples; values are finite."""
    return _PAGE.dump_json(
        [
            (one.name, one.documentation, one.type, [sample[:3] for sample in one.samples])
            for one in families
        ]
    )


def load(page: bytes) -> list[Metric]:
    """What was dumped.

    Raises:
        ValueError: it is no such page.
    """
    return [_family(*fields) for fields in _PAGE.validate_json(page)]


def counted(families: Iterable[Metric]) -> list[Metric]:
    """What remains true when a process has ended: its counters and histograms."""
    return [family for family in families if family.type != "gauge"]


def added(pages: Iterable[Iterable[Metric]]) -> list[Metric]:
    """One page for all, whose families and samples are in the order in which they first come."""
    families: dict[str, Metric] = {}
    values: dict[str, _Values] = {}
    for family in (family for page in pages for family in page):
        families.setdefault(family.name, family)
        of_family = values.setdefault(family.name, {})
        for name, labels, value, *_ in family.samples:
            of_family.setdefault((name, frozenset(labels.items())), []).append(value)
    return [_added(family, values[name]) for name, family in families.items()]


def _added(family: Metric, values: _Values) -> Metric:
    one = FIGURES[family.name].of_workers if family.name in FIGURES else math.fsum
    samples = [(name, dict(labels), one(found)) for (name, labels), found in values.items()]
    return _family(family.name, family.documentation, family.type, samples)


def _family(name: str, documentation: str, kind: str, samples: Iterable[_Sample]) -> Metric:
    family = Metric(name, documentation, kind)
    for sample in samples:
        family.add_sample(*sample)
    return family


WRITE_S = 1.0
"""How old the figures of other workers may be: little beside the time between two scrapes."""
ASKED_S = 90.0
"""For how long after a scrape they are written so often: longer than any usual scrape interval."""
UNASKED_S = 15.0
"""How often they are written after that. What a worker that is killed had not written is lost."""


class WorkerMetrics(Collector):
    """The figures of one worker, and by them those of all.

    Args:
        own: what this worker has counted, and is doing.
        pages: those of all workers, in the same order in each.
        seat: the place of its own among them.
    """

    def __init__(self, own: Collector, pages: Sequence[SharedPage], seat: int) -> None:
        self._own = own
        self._pages = pages
        self._page = pages[seat]
        self._warned: set[object] = set()
        self._earlier = counted(self._read(self._page))
        self._written = b""

    def write(self) -> None:
        """Let the others know, if there is anything new."""
        page = dump(added([self._earlier, self._own.collect()]))
        if page == self._written:
            return
        try:
            self._page.write(page)
        except OSError as error:
            self._warn(self, "other workers cannot be told of this one's metrics", error)
        else:
            self._written = page

    async def keep_writing(self) -> None:
        """Do so again and again."""
        written_s = -UNASKED_S
        while True:
            now_s = time.monotonic()
            if now_s - written_s >= UNASKED_S or self._page.wanted_within(ASKED_S):
                self.write()
                written_s = now_s
            await asyncio.sleep(WRITE_S)

    def collect(self) -> Iterator[Metric]:
        """The figures of all, this one's being those of this moment."""
        yield from self.written().collect()

    def written(self) -> "Written":
        """Write this worker's figures; return all, to be read on any thread."""
        self.write()
        for page in self._pages:
            if page is not self._page:
                with suppress(OSError):  # reading it fails too, and is logged
                    page.want()
        return Written(lambda: added([self._read(page) for page in self._pages]))

    def _read(self, page: SharedPage) -> list[Metric]:
        try:
            return load(page.read() or b"[]")
        except (PageUnreadable, OSError, ValueError) as error:
            self._warn(page, "the metrics of a worker cannot be read, and are left out", error)
            return []

    def _warn(self, about: object, event: str, error: Exception) -> None:
        if about not in self._warned:
            self._warned.add(about)
            structlog.get_logger("epd").warning(event, reason=str(error))


class Written(Collector):
    """What all workers have written."""

    def __init__(self, read: Callable[[], list[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Read it."""
        return iter(self._read())


def bury(page: SharedPage) -> None:
    """Leave of a worker that has died what it counted, and not what it was doing."""
    try:
        page.write(dump(counted(load(page.read() or b"[]"))))
    except (PageUnreadable, OSError, ValueError) as error:
        structlog.get_logger("epd").warning("the metrics of a worker are lost", reason=str(error))
