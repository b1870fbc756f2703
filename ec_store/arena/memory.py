"""Memory of an arena: a memfd that its server creates, and clients map.

Its size never changes: it is sealed, so that no client can take pages away from another, which
would end that process at its next access (fcntl(2), `F_SEAL_SHRINK`). All of its pages are there
before the first client maps it, so no later access can fail or end a process.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ec_store.arena.extents import PAGE_BYTES, Extent
from ec_store.buffers import Buffers
from ec_store.memory_left import available_bytes, check_room

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

SEGMENT_BYTES = 2**30
"""Bytes that a client registers with CUDA at once."""

STEP_BYTES = 256 * 2**20
"""Bytes that are allocated at once. The memory that is left is checked before each step."""

POPULATE_BYTES = 16 * 2**20
"""Bytes that are mapped at once. Meanwhile no other thread can map or unmap memory."""

# Of <asm-generic/mman-common.h>.
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23  # since Linux 5.14
MADV_COLLAPSE = 25  # since Linux 6.1

HUGE_PAGE_BYTES = 2 * 2**20

HUGE_STEP_S = 2.0
"""Time in seconds of the huge pages of one step above which the other steps get small ones: in a
fragmented memory, the kernel moves other pages to make room for each. It takes 0.1 s without."""

HUGE_S = 60.0
"""The same for all steps together."""

SHARE = 8
"""A memory without a given size takes one part in `SHARE` of what is left."""

LEAST_BYTES = 256 * 2**20
MOST_BYTES = 64 * 2**30
"""Bounds of a memory without a given size."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MFD_HUGE_2MB = 21 << 26  # MFD_HUGE_2MB of memfd_create(2), which `os` has from Python 3.14 on


# The methods of `mmap` keep the interpreter's lock.
_libc = ctypes.CDLL(None, use_errno=True)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True, slots=True)
class ArenaMemory:
    """Memory in the server's process.

    Attributes:
        fd: its descriptor.
        segment_bytes: no copy crosses a multiple of it.
        pages: `reserved huge pages of 2 MiB`, `huge pages of 2 MiB` or `pages of 4 KiB`: those of
            most of it.
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
    step_bytes: int = STEP_BYTES,
) -> ArenaMemory:
    """Create and seal a memory with all of its pages.

    Args:
        size_bytes: its size.
        segment_bytes: as in `ArenaMemory`.
        stopped: whether to give up; it is called before each step.
        step_bytes: as `STEP_BYTES`.

    Raises:
        OSError: the machine, or a control group of this process, has not that much memory left.
        InterruptedError: it was stopped.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if size_bytes % HUGE_PAGE_BYTES == 0:
        # Reserved pages are no part of the memory that the machine has left.
        with suppress(OSError):  # none are reserved, or too few
            huge = flags | os.MFD_HUGETLB | _MFD_HUGE_2MB
            fd, _ = _allocate(size_bytes, huge, stopped, step_bytes, reserved=True)
            return ArenaMemory(fd, size_bytes, segment_bytes, "reserved huge pages of 2 MiB")
    fd, huge_bytes = _allocate(size_bytes, flags, stopped, step_bytes, reserved=False)
    pages = "huge pages of 2 MiB" if huge_bytes > size_bytes // 2 else "pages of 4 KiB"
    return ArenaMemory(fd, size_bytes, segment_bytes, pages)


def _allocate(
    size_bytes: int, flags: int, stopped: Callable[[], bool], step_bytes: int, *, reserved: bool
) -> tuple[int, int]:
    """Return the descriptor of a memory, and the bytes of its huge pages that are not reserved."""
    if not reserved:
        check_room(size_bytes)
    fd = os.memfd_create("ec-store", flags)
    try:
        os.fchmod(fd, 0o600)  # another user could open it again through /proc, to write
        os.ftruncate(fd, size_bytes)
        mapped = None if reserved else _map(fd, size_bytes, write=True)
        huge_bytes, huge_s, soon = 0, 0.0, True
        for offset in range(0, size_bytes, step_bytes):
            if stopped():
                raise InterruptedError(errno.EINTR, "it was stopped")
            step = min(step_bytes, size_bytes - offset)
            if mapped is not None:
                check_room(step)
                if soon:
                    began_s = time.monotonic()
                    huge_bytes += _huge_bytes(mapped[offset : offset + step])
                    took_s = time.monotonic() - began_s
                    huge_s += took_s
                    soon = took_s < HUGE_STEP_S and huge_s < HUGE_S
            os.posix_fallocate(fd, offset, step)  # what is not there yet
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd, huge_bytes


def _huge_bytes(step: Bytes) -> int:
    """Allocate huge pages for a part of a memory that has no pages; return their bytes or 0.

    The kernel collapses pages into a huge one if it is asked to, whatever its setting for
    transparent huge pages of shared memory is, but for `deny`.
    """
    address, size_bytes = step.ctypes.data, len(step) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    for offset in range(0, size_bytes, HUGE_PAGE_BYTES):  # where there is none, it makes none
        _madvise(address + offset, PAGE_BYTES, MADV_POPULATE_WRITE)
    collapsed = size_bytes > 0 and _madvise(address, size_bytes, MADV_COLLAPSE) == 0
    return collapsed * size_bytes


def map_memory(fd: int, size_bytes: int, *, write: bool) -> Bytes:
    """Map a memory, which stays mapped while the array or a view of it exists.

    Raises:
        OSError: the descriptor is not of a sealed memory of this size.
    """
    if os.fstat(fd).st_size != size_bytes:
        raise OSError(errno.EINVAL, "the memory has another size than its server says")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise OSError(errno.EINVAL, "the memory is not sealed: its size could change")
    return _map(fd, size_bytes, write=write)


def _map(fd: int, size_bytes: int, *, write: bool) -> Bytes:
    """Map a memory at a multiple of its huge pages, without which none of them is used.

    If another thread takes that address before, the kernel chooses one, with small pages.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # the kernel reserves no memory for it
    anywhere = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=private, prot=0)
    free = np.frombuffer(anywhere, np.uint8)
    wanted = free.ctypes.data + -free.ctypes.data % HUGE_PAGE_BYTES
    del free, anywhere
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
    address = _mmap(wanted, size_bytes, protection, mmap.MAP_SHARED, fd, 0)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    owner = (ctypes.c_uint8 * size_bytes).from_address(address)
    # Not at the end of the process: a device, or another thread, may still be copying.
    weakref.finalize(owner, _munmap, address, size_bytes).atexit = False
    memory = np.frombuffer(memoryview(owner), np.uint8)
    memory.flags.writeable = write
    return memory


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


def in_one_part(parts: Sequence[memoryview], buffers: Buffers) -> memoryview:
    """Return the bytes of an entry, copied into a buffer if they are in several parts."""
    if len(parts) == 1:
        return parts[0]
    return copy_out(parts, buffers.take_buffer(sum(part.nbytes for part in parts)))
