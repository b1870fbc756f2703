"""Pages of shared memory through which the workers of one proxy tell each other what they know.

A page is anonymous memory that is freed with the last process that has it open. It has two halves
and a number that selects the half to read. The writer writes the other half, then the number. A
writer that is killed leaves the previous content intact. A reader that is overtaken twice sees a
mismatch with the number or the digest, and reads again.
"""

import asyncio
import errno
import fcntl
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from struct import Struct
from typing import Any, NamedTuple

import orjson
import structlog

NUMBER = Struct("<Q")
WANTED = Struct("<d")
"""Time of a reader's last request for the page, on this machine's monotonic clock; 0: never."""
HEAD = Struct("<QQ16s")
"""Header of a half: its number, the length of its content, and the digest."""

HALF_BYTES = 64 * 1024**2
"""Capacity of a half, in bytes. Only written bytes use memory."""

ATTEMPTS = 100
"""Upper bound of reads that writers overtake, after which a reader gives up."""


class PageUnreadable(Exception):
    """Error: the page has content, but no complete half."""


class SharedPage:
    """Page of shared memory. One process at a time may write it.

    Attributes:
        descriptor: file descriptor, to pass the page to another process.
    """

    def __init__(self, descriptor: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Use a descriptor. All processes have the same monotonic clock, in seconds."""
        self.descriptor = descriptor
        self._clock = clock

    @classmethod
    def new_page(cls) -> "SharedPage":
        """Create an empty page.

        Raises:
            OSError: there is not enough memory.
        """
        descriptor = os.memfd_create("epd")
        os.fchmod(descriptor, 0o600)
        return cls(descriptor)

    def write(self, page: bytes) -> None:
        """Write the page's next content.

        Raises:
            OSError: it does not fit; the previous content stays.
        """
        number = self.write_count() + 1
        head = HEAD.pack(number, len(page), _digest(page))
        if len(head) + len(page) > HALF_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        self._put(head + page, _half_offset(number))
        self._put(NUMBER.pack(number), 0)

    def read(self) -> bytes | None:
        """Return the content last written, or None if there is none.

        Raises:
            PageUnreadable: there is no complete half.
        """
        for _ in range(ATTEMPTS):
            number = self.write_count()
            if not number:
                return None
            page = self._at(number)
            if page is not None:
                return page
        raise PageUnreadable(f"page {number} is not whole")

    def write_count(self) -> int:
        """Return the number of writes. An equal number means that the content has not changed."""
        found = os.pread(self.descriptor, NUMBER.size, 0)
        number: int = NUMBER.unpack(found)[0] if len(found) == NUMBER.size else 0
        return number

    def ask(self) -> None:
        """Tell the writer that the page has a reader. Any process may call this.

        Raises:
            OSError: there is not enough memory.
        """
        self._put(WANTED.pack(self._clock()), NUMBER.size)

    def wanted_within(self, seconds: float) -> bool:
        """Return whether a reader has called `ask` within these seconds."""
        found = os.pread(self.descriptor, WANTED.size, NUMBER.size)
        wanted_s: float = WANTED.unpack(found)[0] if len(found) == WANTED.size else 0.0
        return wanted_s > 0.0 and self._clock() - wanted_s < seconds

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Lock the page against other writers. The lock ends with the process that has it.

        Raises:
            OSError: another process has the lock.
        """
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield
        finally:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self.descriptor)

    def _at(self, number: int) -> bytes | None:
        head = os.pread(self.descriptor, HEAD.size, _half_offset(number))
        if len(head) < HEAD.size:
            return None
        found, length, digest = HEAD.unpack(head)
        if found != number or length > HALF_BYTES:
            return None
        page = os.pread(self.descriptor, length, _half_offset(number) + HEAD.size)
        return page if _digest(page) == digest else None

    def _put(self, content: bytes, at: int) -> None:
        if os.pwrite(self.descriptor, content, at) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _half_offset(number: int) -> int:
    return HEAD.size + number % 2 * HALF_BYTES


def _digest(page: bytes) -> bytes:
    return hashlib.blake2b(page, digest_size=16).digest()


class Pace(NamedTuple):
    """Times of a worker that writes its page, in seconds.

    Attributes:
        write_s: interval of writing while the page is wanted.
        wanted_s: time for which it is wanted after another worker has asked for it.
        poll_s: interval of the checks whether it is wanted.
        unread_s: interval of writing otherwise.
    """

    write_s: float
    wanted_s: float
    poll_s: float
    unread_s: float = math.inf


class WorkerPages:
    """Values that each worker tells the others as JSON, on a page of its own.

    A warning about a page is logged once.
    """

    def __init__(
        self,
        pages: Sequence[SharedPage],
        index: int,
        make: Callable[[], object],
        what: str,
        pace: Pace,
    ) -> None:
        """Write what `make` returns on the page at `index`. `what` names it in the log."""
        self._pages = pages
        self._page = pages[index]
        self._make = make
        self._what = what
        self._pace = pace
        self._written = b""
        self._warned: set[object] = set()

    def write(self) -> None:
        """Write this worker's values, if they have changed."""
        content = orjson.dumps(self._make())
        if content == self._written:
            return
        try:
            self._page.write(content)
        except OSError as error:
            self._warn(self, f"other workers cannot be told of this one's {self._what}", error)
        else:
            self._written = content

    async def keep_writing(self) -> None:
        pace, written_s = self._pace, -math.inf
        while True:
            now_s = time.monotonic()
            wanted = self._page.wanted_within(pace.wanted_s)
            if wanted or now_s - written_s > pace.unread_s:
                self.write()
                written_s = now_s
            await asyncio.sleep(pace.write_s if wanted else pace.poll_s)

    def ask(self) -> bool:
        """Ask the other workers to write. Return whether all of them were asked already."""
        awake = True
        for page in self._pages:
            if page is not self._page:
                with suppress(OSError):  # reading it fails too, and is logged
                    awake &= page.wanted_within(self._pace.wanted_s)
                    page.ask()
        return awake

    def read(self, page: SharedPage) -> Any:
        try:
            return orjson.loads(page.read() or b"null")
        except (PageUnreadable, OSError, ValueError) as error:
            event = f"the {self._what} of a worker cannot be read, and are left out"
            self._warn(page, event, error)
            return None

    def others(self) -> Iterator[Any]:
        for page in self._pages:
            if page is not self._page and (values := self.read(page)) is not None:
                yield values

    def _warn(self, about: object, event: str, error: Exception) -> None:
        if about not in self._warned:
            self._warned.add(about)
            structlog.get_logger("epd").warning(event, reason=str(error))
