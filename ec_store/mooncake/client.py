"""Client of Mooncake: lanes to the process that runs its library."""

import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

import orjson

from ec_store.buffers import is_unused
from ec_store.errors import StoreUnavailable
from ec_store.mooncake.program import Program, Running
from ec_store.mooncake.url import MooncakeOptions

LANES = 12
"""Calls at once. A server of a memory has up to 4 look-ups, 4 reads and 1 write at once."""

FAILURES = 3
"""Failed transfers in a row after which the process is replaced."""

WAIT_S = 0.005
"""Pause in seconds between two looks for a memory that nothing refers to."""

REPLY_BYTES = 64 * 1024


class Status(IntEnum):
    """Results of the library (`mooncake-store/include/types.h`)."""

    FULL = -200
    TOO_SMALL = -600
    NOT_READY = -703
    NOT_FOUND = -704
    LEASE_EXPIRED = -707
    TRANSFER_FAILED = -800
    NO_REPLY = -900
    NO_REPLY_IN_TIME = -901


MISSES = frozenset({Status.TOO_SMALL, Status.NOT_READY, Status.NOT_FOUND, Status.LEASE_EXPIRED})
"""Results of a read that mean a miss: the value is larger than the memory, not written yet, gone,
or may have been evicted during a read that took longer than the lease."""


class Lane:
    """One call at a time to the process, with a memory that both map.

    Attributes:
        memory: memory of `max_entry_bytes`. Pages that no entry has used take no room.
    """

    def __init__(self, client: "MooncakeClient", number: int, memory: mmap.mmap) -> None:
        self.memory = memory
        self._client = client
        self._number = number

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Return whether values exist. A value that does is protected for the lease time."""
        return [status == 1 for status in self._call("exist", names)]

    def get(self, names: Sequence[str], size_bytes: int) -> list[int]:
        """Read each value to a place of `size_bytes` in the memory.

        Returns:
            The size of each value, or its `Status`.
        """
        places = [size_bytes * number for number in range(len(names))]
        return self._call("get", names, places, [size_bytes] * len(names))

    def read(self, name: str) -> int:
        """Read one value to the start of the memory; return its size, or its `Status`."""
        [size] = self._call("read", name, len(self.memory))
        return size

    def put(self, names: Sequence[str], sizes: Sequence[int]) -> list[int]:
        """Write values that all begin at the start of the memory; one that exists stays.

        Returns:
            For each value 0, or its `Status`.
        """
        return self._call("put", names, [0] * len(names), sizes)

    def remove(self, names: Sequence[str]) -> list[bool]:
        """Remove values, leased or not, and return which existed."""
        return [status == 0 for status in self._call("remove", names)]

    def remove_matching(self, pattern: str) -> int:
        """Remove the values with matching names, and return their number."""
        return self._call("remove_matching", pattern)[0]

    def _call(self, operation: str, *arguments: object) -> list[int]:
        return self._client.call(self._number, operation, arguments)


class MooncakeClient:
    """Client of one host. Thread-safe.

    The library runs in a process of its own, which is replaced when it ends, exceeds the timeout,
    or fails `FAILURES` transfers in a row. It contributes no memory, so that no entry goes with it.
    """

    def __init__(self, options: MooncakeOptions) -> None:
        self._timeout_s = options.timeout_s
        self._changed = threading.Condition()
        self._failures = 0
        memories = [os.memfd_create(f"ec-mooncake-{number}") for number in range(LANES)]
        try:
            size_bytes = -(-options.max_entry_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            for memory in memories:
                os.ftruncate(memory, size_bytes)
            self._free = [
                Lane(self, number, mmap.mmap(memory, size_bytes))
                for number, memory in enumerate(memories)
            ]
        except OSError:
            for memory in memories:
                os.close(memory)
            raise
        self._memories = memories
        self.program = Program("Mooncake's client", options, segment_bytes=0, memories=memories)

    @contextmanager
    def lane(self) -> Iterator[Lane]:
        """Yield a lane with memory that nothing refers to.

        Raises:
            StoreUnavailable: none was released within the timeout.
        """
        lane = self._take()
        try:
            yield lane
        finally:
            with self._changed:
                self._free.append(lane)
                self._changed.notify()

    def _take(self) -> Lane:
        deadline_s = time.monotonic() + self._timeout_s
        with self._changed:
            while True:
                for lane in reversed(self._free):
                    if is_unused(lane.memory):  # no entry refers to it
                        self._free.remove(lane)
                        return lane
                if time.monotonic() > deadline_s:
                    raise StoreUnavailable("all buffers of Mooncake's client are in use")
                self._changed.wait(WAIT_S)

    def call(self, number: int, operation: str, arguments: Sequence[object]) -> list[int]:
        """Call the library through a lane, and return its result.

        Raises:
            StoreUnavailable: the process is being replaced, or the master does not reply.
        """
        running = self.program.running
        if running is None:
            raise StoreUnavailable("Mooncake's client is starting")
        lane = running.lanes[number]
        try:
            lane.settimeout(self._timeout_s)
            lane.send(orjson.dumps([operation, *arguments]))
            reply = lane.recv(REPLY_BYTES)
        except OSError as error:  # the timeout is one
            self.program.replace(running)  # its reply may come late, to the next call of this lane
            raise StoreUnavailable(f"Mooncake's client is replaced: {error}") from error
        if not reply:
            raise StoreUnavailable("Mooncake's client has ended")
        result: list[int] = orjson.loads(reply)
        if Status.NO_REPLY in result or Status.NO_REPLY_IN_TIME in result:
            raise StoreUnavailable("Mooncake's master does not reply")
        self.count(operation, result, running)
        return result

    def count(self, operation: str, result: Sequence[int], running: Running) -> None:
        """Count failed transfers in a row, and end the process after `FAILURES` of them."""
        if Status.TRANSFER_FAILED in result:
            self._failures += 1
            if self._failures >= FAILURES:
                self._failures = 0
                self.program.replace(running)
        elif operation in {"get", "read", "put"} and max(result, default=-1) >= 0:
            self._failures = 0

    def close(self) -> None:
        """End the process. Entries that were returned stay valid."""
        self.program.close()
        for memory in self._memories:
            os.close(memory)
        self._memories = []
