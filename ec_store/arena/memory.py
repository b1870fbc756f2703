"""Memory of an arena: a memfd that its server creates, and clients map.

Its size never changes: it is sealed, so that no client can take pages away from another, which
would end that process at its next access (fcntl(2), `F_SEAL_SHRINK`). All of its pages are there
before the first client maps it, so no later access can fail or end a process.
"""

import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ec_store.arena.extents import Extent
from ec_store.memory_left import available_bytes, check_room

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

SEGMENT_BYTES = 2**30
"""Bytes that a client registers with CUDA at once."""

STEP_BYTES = 256 * 2**20
"""Bytes that are allocated at once. The memory that is left is checked before each step."""

POPULATE_BYTES = 16 * 2**20
"""Bytes that are mapped at once. Meanwhile no other thread can map or unmap memory."""

MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23  # <asm-generic/mman-common.h>, since Linux 5.14

HUGE_PAGE_BYTES = 2 * 2**20

SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
"""Setting of the kernel: memory like this one has huge pages with `always`, `within_size` or
`advise`."""

SMAPS_LINES = 30
"""Upper bound of the lines of one mapping in smaps."""

SHARE = 8
"""A memory without a given size takes one part in `SHARE` of what is left."""

LEAST_BYTES = 256 * 2**20
MOST_BYTES = 64 * 2**30
"""Bounds of a memory without a given size."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MFD_HUGE_2MB = 21 << 26  # MFD_HUGE_2MB of memfd_create(2), which `os` has from Python 3.14 on


# The method of `mmap` keeps the interpreter's lock.
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class ArenaMemory:
    """Memory in the server's process.

    Attributes:
        fd: its descriptor.
        segment_bytes: no copy crosses a multiple of it.
        pages: `reserved huge pages of 2 MiB`, `huge pages of 2 MiB` or `pages of 4 KiB`. Without
            reserved ones it depends on `SHMEM_HUGE`.
    """

    fd: int
    size_bytes: int
    segment_bytes: int
    pages: str


def default_bytes() -> int:
    """Return the size of a memory for which none is given, a multiple of `LEAST_BYTES`.

    It is an eighth of what the machine, and the control groups of this process, have left. So a
    second one fits beside it, while clients still map the memory of a killed server.
    """
    multiples = (available_bytes() or 0) // SHARE // LEAST_BYTES
    return min(MOST_BYTES, max(1, multiples) * LEAST_BYTES)


def create_memory(
    size_bytes: int,
    segment_bytes: int = SEGMENT_BYTES,
    *,
    stopped: Callable[[], bool] = lambda: False,
) -> ArenaMemory:
    """Create and seal a memory with all of its pages.

    Args:
        size_bytes: its size.
        segment_bytes: as in `ArenaMemory`.
        stopped: whether to give up; it is called before each step.

    Raises:
        OSError: the machine, or a control group of this process, has not that much memory left.
        InterruptedError: it was stopped.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if size_bytes % HUGE_PAGE_BYTES == 0:
        # Reserved pages are no part of the memory that the machine has left.
        with suppress(OSError):  # none are reserved, or too few
            huge = flags | os.MFD_HUGETLB | _MFD_HUGE_2MB
            fd = _allocate(size_bytes, huge, stopped, reserved=True)
            return ArenaMemory(fd, size_bytes, segment_bytes, "reserved huge pages of 2 MiB")
    fd = _allocate(size_bytes, flags, stopped, reserved=False)
    pages = "huge pages of 2 MiB" if _is_huge(fd, size_bytes) else "pages of 4 KiB"
    return ArenaMemory(fd, size_bytes, segment_bytes, pages)


def _allocate(size_bytes: int, flags: int, stopped: Callable[[], bool], *, reserved: bool) -> int:
    if not reserved:
        check_room(size_bytes)
    fd = os.memfd_create("ec-store", flags)
    try:
        os.fchmod(fd, 0o600)  # another user could open it again through /proc, to write
        os.ftruncate(fd, size_bytes)
        advised = None if reserved else _map_advised(fd, size_bytes)
        for offset in range(0, size_bytes, STEP_BYTES):
            if stopped():
                raise InterruptedError(errno.EINTR, "it was stopped")
            step = min(STEP_BYTES, size_bytes - offset)
            if not reserved:
                check_room(step)
            if advised is not None:  # `fallocate` would not know of the advice
                _madvise(advised.ctypes.data + offset, step, MADV_POPULATE_WRITE)
            os.posix_fallocate(fd, offset, step)  # what is not there yet
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def _map_advised(fd: int, size_bytes: int) -> Bytes | None:
    """Map a memory to allocate huge pages; None if the kernel allocates none."""
    try:
        allowed = SHMEM_HUGE.read_text()
    except OSError:
        return None
    if any(f"[{word}]" in allowed for word in ("never", "deny")):
        return None
    mapped = np.frombuffer(mmap.mmap(fd, size_bytes, mmap.MAP_SHARED), np.uint8)
    _madvise(mapped.ctypes.data, size_bytes, mmap.MADV_HUGEPAGE)
    return mapped


def _is_huge(fd: int, size_bytes: int) -> bool:
    """Return whether most of the beginning of a memory is in huge pages: a mapping shows them."""
    size_bytes = min(size_bytes, STEP_BYTES)
    mapped = np.frombuffer(mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
    _madvise(mapped.ctypes.data, size_bytes, MADV_POPULATE_READ)
    found = re.search(r"^ShmemPmdMapped: +(\d+) kB$", _smaps(mapped.ctypes.data), re.MULTILINE)
    return found is not None and int(found[1]) * 1024 > size_bytes // 2


def _smaps(address: int) -> str:
    """Return the lines of the mapping at an address in /proc/self/smaps (proc(5))."""
    begin = f"{address:x}-"
    with (
        suppress(OSError),  # a process may be forbidden to read its own
        Path("/proc/self/smaps").open(encoding="ascii", errors="replace") as lines,
    ):
        following = itertools.dropwhile(lambda line: not line.startswith(begin), lines)
        return "".join(itertools.islice(following, SMAPS_LINES))
    return ""


def map_memory(fd: int, size_bytes: int, *, write: bool) -> Bytes:
    """Map a memory, which stays mapped while the array or a view of it exists.

    Raises:
        OSError: the descriptor is not of a sealed memory of this size.
    """
    if os.fstat(fd).st_size != size_bytes:
        raise OSError(errno.EINVAL, "the memory has another size than its server says")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise OSError(errno.EINVAL, "the memory is not sealed: its size could change")
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
    return np.frombuffer(mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, protection), np.uint8)


def populate(memory: Bytes, *, write: bool) -> threading.Thread:
    """Map the pages of a memory on a thread, ahead of their first use in this process.

    Otherwise each page of 4 KiB costs a page fault when it is first read or written. The thread
    writes nothing, and takes about 0.2 s per GiB for half of a core. It ends with the memory, and
    in a child of `fork`. Before Linux 5.14 it does nothing.
    """
    advice = MADV_POPULATE_WRITE if write else MADV_POPULATE_READ
    thread = threading.Thread(
        target=_populate, args=(weakref.ref(memory), advice), name="ec-store-pages", daemon=True
    )
    thread.start()
    return thread


def _populate(mapped: "weakref.ref[Bytes]", advice: int) -> None:
    offset = 0
    while (memory := mapped()) is not None and offset < len(memory):
        began_s = time.monotonic()
        step_bytes = min(POPULATE_BYTES, len(memory) - offset)
        if _madvise(memory.ctypes.data + offset, step_bytes, advice):
            return
        offset += step_bytes
        del memory
        time.sleep(time.monotonic() - began_s)


def parts_of(memory: Bytes, extents: Iterable[Extent], size_bytes: int) -> list[Bytes]:
    """Return the bytes of an entry of this size, in order.

    Raises:
        ValueError: the extents are not in the memory, or too small.
    """
    parts = []
    for offset, extent_bytes in extents:
        end = offset + min(extent_bytes, size_bytes)
        if not 0 <= offset <= end <= len(memory):
            raise ValueError(f"an extent at {offset} of a memory of {len(memory)} bytes")
        parts.append(memory[offset:end])
        size_bytes -= end - offset
    if size_bytes:
        raise ValueError(f"the extents lack {size_bytes} bytes")
    return parts


def copy_in(data: memoryview, parts: Sequence[Bytes]) -> None:
    """Copy bytes into parts of the memory."""
    source, begin = np.frombuffer(data, np.uint8), 0
    for part in parts:
        np.copyto(part, source[begin : begin + len(part)])
        begin += len(part)


def copy_out(parts: Sequence[memoryview], buffer: memoryview) -> memoryview:
    """Copy parts of the memory into a buffer, and return it."""
    target, begin = np.frombuffer(buffer, np.uint8), 0
    for part in parts:
        np.copyto(target[begin : begin + len(part)], np.frombuffer(part, np.uint8))
        begin += len(part)
    return buffer
