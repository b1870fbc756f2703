"""Host memory that the scheduler's process shares with the workers of its machine.

The scheduler's process puts entries there before a step needs them, and a step says no more than
where they are. Each worker maps the memory once and registers it with CUDA once.

The memory is a memfd (memfd_create(2)), which workers open through the scheduler's `/proc`:

- It does not depend on the size of /dev/shm, which is 64 MB in a container by default.
- It has no name that could be left behind: the kernel frees it with the last process that has it
  mapped, however that ends.
- Its pages are allocated when it is made. A machine without that much memory says so then: there is
  no SIGBUS later.

The first page is a token, by which workers know the memory, and one 64-bit number for each worker,
which that worker alone writes: 0 until it has mapped the memory, then one more than the last step
whose entries it has read. What a step refers to stays until all workers have read it.
"""

import mmap
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from ec_store.device.slots import Slots

HEADER_BYTES = 4096
TOKEN_BYTES = 16
MAX_READERS = (HEADER_BYTES - TOKEN_BYTES) // 8

_OPEN = mmap.MAP_SHARED | mmap.MAP_POPULATE


class Handle(NamedTuple):
    """What a worker maps the memory by.

    Attributes:
        path: in `/proc`, of the process that made it.
        size_bytes: of the whole memory.
        token: what it begins with: in another PID namespace the path is of another process.
    """

    path: str
    size_bytes: int
    token: bytes


class Place(NamedTuple):
    """Where an entry is in the memory."""

    offset: int
    size_bytes: int


class Shared(NamedTuple):
    """What a step says of the memory.

    Attributes:
        handle: the memory.
        number: of the last step with entries in it, this one included.
    """

    handle: Handle
    number: int


class Region:
    """The scheduler's end. Safe to use from many threads."""

    def __init__(self, size_bytes: int, readers: int) -> None:
        """Allocate the memory.

        Args:
            size_bytes: for entries.
            readers: how many workers read each step's entries.

        Raises:
            OSError: there is not that much memory.
            ValueError: there are too many readers.
        """
        if not 0 < readers <= MAX_READERS:
            raise ValueError(f"{readers} readers are not 1 to {MAX_READERS}")
        self._slots = Slots(size_bytes)
        total = HEADER_BYTES + self._slots.size_bytes
        self._fd = os.memfd_create("ec-store")
        try:
            os.posix_fallocate(self._fd, 0, total)
            memory = mmap.mmap(self._fd, total, flags=_OPEN)
        except OSError:
            os.close(self._fd)
            raise
        token = secrets.token_bytes(TOKEN_BYTES)
        memory[:TOKEN_BYTES] = token
        self._handle = Handle(f"/proc/{os.getpid()}/fd/{self._fd}", total, token)
        self._words = _words(memory)[:readers]
        self._entries = np.frombuffer(memory, np.uint8, offset=HEADER_BYTES)
        self._address = self._entries.ctypes.data
        self._number = 0
        self._lock = threading.Lock()
        self._sent: deque[tuple[int, list[memoryview]]] = deque()

    def place(self, data: memoryview) -> memoryview | None:
        """Copy bytes into the memory.

        Their place is free again when this view and all views of it are forgotten, and all workers
        have read them.

        Returns:
            A read-only view; None where there is no room.
        """
        self._release()
        offset = self._slots.take(data.nbytes) if data.nbytes else None
        if offset is None:
            return None
        place = self._entries[offset : offset + data.nbytes]
        weakref.finalize(place, self._slots.give, offset)
        # numpy copies without the interpreter's lock.
        np.copyto(place, np.frombuffer(data, np.uint8))
        return place.data.toreadonly()

    def find(self, data: memoryview) -> Place | None:
        """Return where a view lies; None where it is of other memory."""
        offset = np.frombuffer(data, np.uint8).ctypes.data - self._address
        inside = 0 <= offset < len(self._entries)
        return Place(offset, data.nbytes) if inside else None

    def is_mapped(self) -> bool:
        """Whether all workers have mapped it, so that steps may refer to it."""
        return bool(self._words.all())

    def send(self, views: Iterable[memoryview]) -> None:
        """Keep views until all workers have read them, in the step that is sent next."""
        kept = list(views)
        if kept:
            with self._lock:
                self._number += 1
                self._sent.append((self._number, kept))
        self._release()

    def shared(self) -> Shared:
        """Return what the next step says."""
        return Shared(self._handle, self._number)

    def close(self) -> None:
        """Let no further worker map it. The memory is freed with the last process that has it."""
        os.close(self._fd)

    def taken_bytes(self) -> int:
        """Bytes that are taken, in whole pages."""
        self._release()
        return self._slots.taken_bytes()

    def _release(self) -> None:
        read = int(self._words.min()) - 1
        with self._lock:
            while self._sent and self._sent[0][0] <= read:
                self._sent.popleft()


class RegionReader:
    """A worker's end."""

    def __init__(self, handle: Handle, reader: int) -> None:
        """Map the memory, and register it with CUDA.

        Args:
            handle: as a step has it.
            reader: this worker's number, from 0.

        Raises:
            OSError: it is not to be had here: on another machine, of another user, or it is closed.
        """
        fd = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != handle.size_bytes:
                raise OSError(f"{handle.path} is another file")
            memory = mmap.mmap(fd, handle.size_bytes, flags=_OPEN)
        finally:
            os.close(fd)
        if memory[:TOKEN_BYTES] != handle.token:
            raise OSError(f"{handle.path} is another file")
        self._words = _words(memory)
        self._reader = reader
        mapped = np.frombuffer(memory, np.uint8)
        self.registered = register(mapped)
        self._memory = torch.from_numpy(mapped)

    def view(self, place: Place) -> torch.Tensor:
        """Return an entry's bytes, uint8, which must not be used after `has_read`."""
        start = HEADER_BYTES + place.offset
        return self._memory[start : start + place.size_bytes]

    def has_read(self, number: int) -> None:
        """Tell the scheduler that nothing refers to entries of steps up to this one.

        Args:
            number: 0 tells that this worker has mapped the memory.
        """
        self._words[self._reader] = number + 1


def _words(memory: mmap.mmap) -> "np.ndarray[Any, np.dtype[np.uint64]]":
    return np.frombuffer(memory, np.uint64, count=MAX_READERS, offset=TOKEN_BYTES)


def register(memory: "np.ndarray[Any, np.dtype[np.uint8]]") -> bool:
    """Register memory with CUDA or ROCm until it is freed, so that devices copy from it themselves.

    Call it on a thread that ends: an error stays the last one of its thread, where PyTorch may take
    it for another call's.

    Returns:
        False where there is no such device or the driver refuses: copies then take longer.
    """
    if not torch.cuda.is_available():
        return False
    cudart, address = torch.cuda.cudart(), memory.ctypes.data
    if int(cudart.cudaHostRegister(address, memory.nbytes, 0)) != 0:
        return False
    # Otherwise devices would copy from these pages where other memory is mapped at this address.
    weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
    return True
