"""Bytes that one process writes again and again, and others read: the last whole ones, always.

They are in memory that has no name, and is gone with the last process that has it open.

A number tells which of two halves is read; the other one is written, and then the number. So a
writer that is killed leaves what it wrote before. A reader that is overtaken twice finds what does
not fit the number or the digest, and looks again.
"""

import errno
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from struct import Struct

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
