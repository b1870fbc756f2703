"""Page of memory in which the workers of an engine report to their scheduler's process.

It is a memfd (memfd_create(2)), which workers open through the scheduler's `/proc`: it has no name
that could be left behind, and does not depend on the size of /dev/shm.

It contains a token, by which workers identify the memory, the number of the last step that may have
places in the host's memory (`ec_store.arena`), and a row of 64-bit words for each worker, which
only that worker writes:

- A number, 0 until the worker has mapped the page. Then it is one more than the number of the last
  step that the worker has read. An entry of a step stays until all workers have read it.
- The name of the host's memory that the worker has mapped, 0 without one. The scheduler's process
  writes the number of a step before it reads the names, and a worker removes its name before it
  reads that number. So a worker that has read the step of that number can unmap its memory: no step
  on its way has places there.
"""

import mmap
import os
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

PAGE_BYTES = 4096
TOKEN_BYTES = 16
NAME_WORDS = 2
"""Words of a memory's name, which has 16 bytes."""

MAX_READERS = (PAGE_BYTES - TOKEN_BYTES - 8) // (8 * (1 + NAME_WORDS))


Words = np.ndarray[Any, np.dtype[np.uint64]]


class Handle(NamedTuple):
    """Data that a worker needs to map the page.

    Attributes:
        path: path in `/proc`, of the process that created it.
    """

    path: str
    token: bytes


class SharedRegion(NamedTuple):
    """Part of a step that describes the page.

    Attributes:
        number: number of the last step with places in the host's memory, this step included.
    """

    handle: Handle
    number: int


class Region:
    """Page of reports, in the scheduler's process. Thread-safe."""

    def __init__(self, readers: int) -> None:
        """Allocate the page for this number of workers.

        Raises:
            OSError: the kernel refuses.
            ValueError: the number of readers is out of range.
        """
        if not 0 < readers <= MAX_READERS:
            raise ValueError(f"{readers} readers: the number must be 1 to {MAX_READERS}")
        self._fd = os.memfd_create("ec-store")
        try:
            os.ftruncate(self._fd, PAGE_BYTES)
            memory = mmap.mmap(self._fd, PAGE_BYTES, flags=mmap.MAP_SHARED)
        except OSError:
            os.close(self._fd)
            raise
        token = secrets.token_bytes(TOKEN_BYTES)
        memory[:TOKEN_BYTES] = token
        self._handle = Handle(f"/proc/{os.getpid()}/fd/{self._fd}", token)
        self._last, rows = _words(memory)
        self._read, self._names = rows[:readers, 0], rows[:readers, 1:]
        self._number = 0
        self._lock = threading.Lock()
        self._sent: deque[tuple[int, Sequence[object]]] = deque()

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
        """Close the descriptor: no more workers can map the page. Its last process frees it."""
        os.close(self._fd)

    def release(self) -> None:
        """Drop the objects of steps that all workers have read."""
        read = int(self._read.min()) - 1
        with self._lock:
            while self._sent and self._sent[0][0] <= read:
                self._sent.popleft()


class RegionReader:
    """Page of reports, mapped in a worker."""

    def __init__(self, handle: Handle, reader: int) -> None:
        """Map the page as the worker of this index, from 0.

        Raises:
            OSError: it cannot be mapped: it is on another machine, of another user, or closed.
        """
        fd = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != PAGE_BYTES:
                raise OSError(f"{handle.path} is another file")
            memory = mmap.mmap(fd, PAGE_BYTES, flags=mmap.MAP_SHARED)
        finally:
            os.close(fd)
        if memory[:TOKEN_BYTES] != handle.token:
            raise OSError(f"{handle.path} is another file")
        self._last, rows = _words(memory)
        self._row = rows[reader]

    def has_read(self, number: int) -> None:
        """Report that this worker no longer uses entries of steps up to this one.

        Number 0 reports that it has mapped the page.
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
    words = np.frombuffer(memory, np.uint64, (PAGE_BYTES - TOKEN_BYTES) // 8, TOKEN_BYTES)
    rows = words[1 : 1 + MAX_READERS * (1 + NAME_WORDS)]
    return words[:1], rows.reshape(MAX_READERS, 1 + NAME_WORDS)
