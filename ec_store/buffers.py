"""Memory that large entries are read into."""

import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress

UNUSED_BYTES = 64 * 2**20
"""Most unused memory that is kept."""

UNUSED_SHARE = 16
"""Unused memory is at most one part in so many of the memory in use.

Below `UNUSED_BYTES` in use, it fills up to `UNUSED_BYTES`. It comes on top of what the connector
holds (`memory_bytes`).
"""

_HUGE_PAGE = 2 * 2**20


class Buffers:
    """Memory that large entries are read into, and that is used again once nothing refers to it.

    The kernel clears new memory before it lends it, page by page. That takes longer than reading an
    entry into it.
    """

    def __init__(self) -> None:
        self._lent: list[mmap.mmap] = []
        self.renew_locks()

    def renew_locks(self) -> None:
        """Begin with a free lock, in a child of `fork`."""
        self._lock = threading.Lock()

    def take(self, size: int) -> memoryview:
        """Memory of that size. It is given back by forgetting it and every view of it.

        It lies in a buffer of as many pages as it needs, since `ec_store.memory` reserves that
        many. A buffer of up to twice as many is cut. Costs a call for each buffer that is in use
        or kept.
        """
        whole = max(1, -(-size // _HUGE_PAGE)) * _HUGE_PAGE
        with self._lock:
            unused = [buffer for buffer in self._lent if _unused(buffer)]
            fitting = [buffer for buffer in unused if whole <= len(buffer) <= 2 * whole]
            if fitting:
                buffer = min(fitting, key=len)
                if len(buffer) > whole:
                    buffer.resize(whole)
                return memoryview(buffer)[:size]
            self._trim(unused, whole)
            buffer = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without them
                buffer.madvise(mmap.MADV_HUGEPAGE)
            self._lent.append(buffer)
            return memoryview(buffer)[:size]

    def _trim(self, unused: Sequence[mmap.mmap], wanted: int) -> None:
        """Let go of unused memory above the limit, the oldest first, before more is mapped."""
        unused_bytes = sum(map(len, unused))
        used = sum(map(len, self._lent)) - unused_bytes + wanted
        over = unused_bytes - min(UNUSED_BYTES, max(UNUSED_BYTES - used, used // UNUSED_SHARE))
        for buffer in unused:
            if over > 0:
                over -= len(buffer)
                self._lent.remove(buffer)


def _unused(buffer: mmap.mmap) -> bool:
    """Whether no view of it is left: memory with views refuses to be resized, even to its size."""
    try:
        buffer.resize(len(buffer))
    except BufferError:
        return False
    return True
