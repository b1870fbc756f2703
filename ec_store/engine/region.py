"""Host memory that the scheduler's process shares with the workers on its machine.

The scheduler's process places entries there before a step needs them, and the step contains only
their places, which `Slots` allocates. Each worker maps the memory once and registers it with CUDA
once.

The memory is a memfd (memfd_create(2)), which workers open through the scheduler's `/proc`:

- It does not depend on the size of /dev/shm, which is 64 MB in a container by default.
- It has no name that could be left behind: the kernel frees it with the last process that maps it,
  however that process ends.
- Its pages are allocated at its creation, and no access raises SIGBUS later. If the machine or a
  control group has less memory left, the creation fails before: the kernel would end the process.

The first page contains a token, by which workers identify the memory, the number of the last step
that may have places, and a row of 64-bit words for each worker, which only that worker writes:

- A number, 0 until the worker has mapped the memory. Then it is one more than the number of the
  last step that the worker has read. An entry of a step stays until all workers have read it.
- The name of the host's memory (`ec_store.arena`) that the worker has mapped, 0 without one. Beside
  such a memory the region is this page alone. The scheduler's process writes the number of a step
  before it reads the names, and a worker removes its name before it reads that number. So a worker
  that has read the step of that number can unmap its memory: no step on its way has places there.
"""

import mmap
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ec_store.engine.slots import Slots
from ec_store.memory_left import check_room

READ_ONLY = 8
"""`cudaHostRegisterReadOnly` of cudaHostRegister, which a device supports if its attribute
`hostRegisterReadOnlySupported` says so."""

HEADER_BYTES = 4096
TOKEN_BYTES = 16
NAME_WORDS = 2
"""Words of a memory's name, which has 16 bytes."""

MAX_READERS = (HEADER_BYTES - TOKEN_BYTES - 8) // (8 * (1 + NAME_WORDS))


Words = np.ndarray[Any, np.dtype[np.uint64]]


class RegionHandle(NamedTuple):
    """Data that a worker needs to map the memory.

    Attributes:
        path: path in `/proc`, of the process that created it.
        size_bytes: size of the whole memory.
        token: first bytes of the memory: in another PID namespace the path is of another process.
    """

    path: str
    size_bytes: int
    token: bytes


class Place(NamedTuple):
    """Location of an entry in the memory."""

    offset: int
    size_bytes: int


class SharedRegion(NamedTuple):
    """Part of a step that describes the memory.

    Attributes:
        number: number of the last step with entries in the memory, this step included.
    """

    handle: RegionHandle
    number: int


class Region:
    """Shared memory, in the scheduler's process. Thread-safe."""

    def __init__(self, size_bytes: int, readers: int) -> None:
        """Allocate memory for entries, which this number of workers read.

        Raises:
            OSError: the machine, or a control group of this process, has not that much memory left.
            ValueError: the number of readers is out of range.
        """
        if not 0 < readers <= MAX_READERS:
            raise ValueError(f"{readers} readers: the number must be 1 to {MAX_READERS}")
        self._slots = Slots(size_bytes)
        total = HEADER_BYTES + self._slots.size_bytes
        check_room(total)
        self._fd = os.memfd_create("ec-store")
        try:
            os.posix_fallocate(self._fd, 0, total)
            # No other thread of this process has work yet: in Python 3.11, `mmap` keeps the
            # interpreter's lock while it maps the pages.
            memory = mmap.mmap(self._fd, total, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError:
            os.close(self._fd)
            raise
        token = secrets.token_bytes(TOKEN_BYTES)
        memory[:TOKEN_BYTES] = token
        self._handle = RegionHandle(f"/proc/{os.getpid()}/fd/{self._fd}", total, token)
        self._last, rows = _words(memory)
        self._read, self._names = rows[:readers, 0], rows[:readers, 1:]
        self._entries = np.frombuffer(memory, np.uint8, offset=HEADER_BYTES)
        self._address = self._entries.ctypes.data
        self._number = 0
        self._lock = threading.Lock()
        self._sent: deque[tuple[int, Sequence[object]]] = deque()

    def copy_in(self, data: memoryview) -> memoryview | None:
        """Copy bytes into the memory, and return a read-only view; None if there is no room.

        Their place is free again after the last view of it is deleted, and all workers have read
        it.
        """
        self.release()
        offset = self._slots.take_slot(data.nbytes) if data.nbytes else None
        if offset is None:
            return None
        place = self._entries[offset : offset + data.nbytes]
        weakref.finalize(place, self._slots.free_slot, offset)
        # numpy copies without the interpreter's lock.
        np.copyto(place, np.frombuffer(data, np.uint8))
        return place.data.toreadonly()

    def find_place(self, data: memoryview) -> Place | None:
        """Return the place of a view; None if it is in other memory."""
        offset = np.frombuffer(data, np.uint8).ctypes.data - self._address
        inside = 0 <= offset < len(self._entries)
        return Place(offset, data.nbytes) if inside else None

    def is_mapped(self) -> bool:
        """Return whether all workers have mapped the memory, so that steps may refer to it."""
        return bool(self._read.all())

    def have_mapped(self, name: bytes) -> bool:
        """Return whether all workers have mapped the host's memory of this name.

        They keep it mapped until they have read the step that is sent next.
        """
        self._last[0] = self._number + 1
        return bool((self._names == np.frombuffer(name, np.uint64)).all())

    def send(self, sent: Sequence[object]) -> None:
        """Keep objects until all workers have read the step that is sent next."""
        with self._lock:
            if sent:
                self._number += 1
                self._sent.append((self._number, tuple(sent)))
            self._last[0] = self._number
        self.release()

    def shared_region(self) -> SharedRegion:
        return SharedRegion(self._handle, self._number)

    def close(self) -> None:
        """Close the descriptor: no more workers can map the memory. Its last process frees it."""
        os.close(self._fd)

    def taken_bytes(self) -> int:
        """Return the bytes in use, in whole pages."""
        self.release()
        return self._slots.taken_bytes()

    def release(self) -> None:
        """Drop the objects of steps that all workers have read."""
        read = int(self._read.min()) - 1
        with self._lock:
            while self._sent and self._sent[0][0] <= read:
                self._sent.popleft()


class RegionReader:
    """Shared memory, mapped in a worker."""

    def __init__(self, handle: RegionHandle, reader: int) -> None:
        """Map the memory as the worker of this index, from 0, and register it with CUDA.

        Raises:
            OSError: the memory cannot be mapped: it is on another machine, of another user, or
                closed.
        """
        fd = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != handle.size_bytes:
                raise OSError(f"{handle.path} is another file")
            # Without MAP_POPULATE, which would stop the model's thread, see `Region`. CUDA maps all
            # pages when it registers them; a CPU maps them as it reads.
            memory = mmap.mmap(fd, handle.size_bytes, flags=mmap.MAP_SHARED)
        finally:
            os.close(fd)
        if memory[:TOKEN_BYTES] != handle.token:
            raise OSError(f"{handle.path} is another file")
        self._last, rows = _words(memory)
        self._row = rows[reader]
        mapped = np.frombuffer(memory, np.uint8)
        self.registered = register(mapped)
        self._memory = torch.from_numpy(mapped)

    def view(self, place: Place) -> torch.Tensor:
        """Return an entry's bytes, uint8, which must not be used after `has_read`."""
        start = HEADER_BYTES + place.offset
        return self._memory[start : start + place.size_bytes]

    def has_read(self, number: int) -> None:
        """Report that this worker no longer uses entries of steps up to this one.

        Number 0 reports that it has mapped the memory.
        """
        self._row[0] = number + 1

    def has_mapped(self, name: bytes | None) -> None:
        """Report that this worker has mapped the host's memory of this name; None: no memory."""
        self._row[1:] = 0
        if name is not None:
            self._row[1:] = np.frombuffer(name, np.uint64)

    def has_read_all(self) -> bool:
        """Return whether no step is on its way, or being copied, that may have places."""
        return bool(self._last[0] < self._row[0])


def _words(memory: mmap.mmap) -> tuple[Words, Words]:
    """Return the number of the last step that may have places, and a row for each worker."""
    words = np.frombuffer(memory, np.uint64, (HEADER_BYTES - TOKEN_BYTES) // 8, TOKEN_BYTES)
    rows = words[1 : 1 + MAX_READERS * (1 + NAME_WORDS)]
    return words[:1], rows.reshape(MAX_READERS, 1 + NAME_WORDS)


def register(
    memory: "np.ndarray[Any, np.dtype[np.uint8]]", begin: int = 0, end: int | None = None
) -> bool:
    """Register memory with CUDA or ROCm until it is freed, so that devices copy from it directly.

    Call it on a thread that launches no kernels. An error stays the last one of its thread, and
    PyTorch could attribute it to a kernel there.

    Args:
        memory: the memory. If it cannot be written, it is registered for reading alone.
        begin: offset of the first byte to register.
        end: offset after the last one; None: the end of the memory.

    Returns:
        False if there is no such device or the driver refuses: copies are slower then.
    """
    if not torch.cuda.is_available():
        return False
    part = memory[begin:end]
    cudart, address = torch.cuda.cudart(), part.ctypes.data
    flags = 0 if memory.flags.writeable else READ_ONLY
    if int(cudart.cudaHostRegister(address, part.nbytes, flags)) != 0:
        return False
    # Otherwise devices would copy from these pages after other memory is mapped at this address.
    weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
    return True
