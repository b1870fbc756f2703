"""Pool of buffers that large entries are read into."""

import mmap
from collections.abc import Sequence
from contextlib import suppress

from ec_store.counts import ForkLock

UNUSED_BYTES = 64 * 2**20
"""Upper bound in bytes of the unused memory that the pool keeps."""

UNUSED_SHARE = 16
"""Divisor: unused memory is at most this fraction of the memory in use.

While less than `UNUSED_BYTES` is in use, used and unused memory together may reach `UNUSED_BYTES`.
Unused memory comes on top of the connector's budget (`memory_bytes`).
"""

_HUGE_PAGE = 2 * 2**20


class Buffers:
    """Buffers for large entries, reused as soon as nothing refers to them.

    The kernel clears fresh memory page by page before a process gets it. That takes longer than
    reading an entry into it.
    """

    def __init__(self) -> None:
        self._lent: list[mmap.mmap] = []
        self._lock = ForkLock()

    def take_buffer(self, size: int) -> memoryview:
        """Return writable memory of `size` bytes, which is reused after its last view is deleted.

        The buffer has the least number of huge pages that the size needs, since
        `ec_store.engine.entry_memory` reserves that many. A buffer of up to twice that number is
        shrunk to fit. The cost is one system call for each buffer in the pool, used or not.
        """
        whole = max(1, -(-size // _HUGE_PAGE)) * _HUGE_PAGE
        with self._lock.mutex:
            unused = [buffer for buffer in self._lent if is_unused(buffer)]
            fitting = [buffer for buffer in unused if whole <= len(buffer) <= 2 * whole]
            if fitting:
                buffer = min(fitting, key=len)
                if len(buffer) > whole:
                    buffer.resize(whole)
            else:
                self._trim(unused, whole)
                buffer = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                with suppress(OSError):  # a kernel without huge pages
                    buffer.madvise(mmap.MADV_HUGEPAGE)
                self._lent.append(buffer)
            return memoryview(buffer)[:size]

    def _trim(self, unused: Sequence[mmap.mmap], wanted: int) -> None:
        """Drop unused buffers above the limit, the oldest first, before more memory is mapped."""
        unused_bytes = sum(map(len, unused))
        used = sum(map(len, self._lent)) - unused_bytes + wanted
        over = unused_bytes - min(UNUSED_BYTES, max(UNUSED_BYTES - used, used // UNUSED_SHARE))
        for buffer in unused:
            if over > 0:
                over -= len(buffer)
                self._lent.remove(buffer)


def is_unused(buffer: mmap.mmap) -> bool:
    """Return whether the buffer has no views: `resize` fails for one with views, at any size."""
    try:
        buffer.resize(len(buffer))
    except BufferError:
        return False
    return True
