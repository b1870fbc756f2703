"""Memory of the host in the workers of an engine: mapped, and registered with CUDA.

Each process has one connection to the server (`ec_store.arena`). The scheduler's connection pins
entries, and a worker's connection holds the writes that it has begun. A thread of each process
looks after the connection, so that no step waits for that.
"""

import logging
import os
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ec_store.arena.connection import ArenaConnection
from ec_store.arena.memory import Bytes, parts_of
from ec_store.arena.store import ArenaStore, HostPlace
from ec_store.engine.backchannel import Sender
from ec_store.engine.region import register
from ec_store.engine.tensors import Loader, as_tensor
from ec_store.engine.threads import PeriodicThread
from ec_store.errors import StoreUnavailable

logger = logging.getLogger("vllm.ec_store")


class HostUsage(NamedTuple):
    """What a process holds of the host's memory.

    Attributes:
        connections: connections to the server, each with one descriptor.
        mapped_bytes: mapped bytes, earlier memories that are still read included.
        registered_bytes: bytes that are registered with CUDA, and so locked.
    """

    connections: int = 0
    mapped_bytes: int = 0
    registered_bytes: int = 0


def usage_of(connection: ArenaConnection, registered_bytes: int = 0) -> HostUsage:
    """Return what this process holds through a connection."""
    connected = int(connection.arena is not None)
    return HostUsage(connected, connection.mapped_bytes, registered_bytes)


def host_gauges(usages: Iterable[HostUsage]) -> dict[str, float]:
    """Return the sums over the processes of an engine, by the names of their metrics."""
    sums = HostUsage(*map(sum, zip(*usages, strict=True)))
    return {f"host_{name}": value for name, value in sums._asdict().items()}


class HostMemory:
    """Memory of the host in a worker: mapped and registered with CUDA on a thread beside serving.

    It is registered segment by segment. Copies from and to a segment that is not registered yet go
    through memory that is. After its server has ended, the memory is unmapped as soon as no step
    refers to it. At most one memory is mapped by this object.
    """

    def __init__(self, store: ArenaStore, loader: Loader | None, sender: Sender) -> None:
        """Create it; `start` maps the memory.

        Args:
            store: store with the connection that the thread looks after.
            loader: loader of steps with places in the memory; None if this worker loads none.
            sender: sender of the `HostUsage`, which this object closes.
        """
        self._connection = store.connection
        self._check = store.check
        self._loader = loader
        self._sender = sender
        self._memory: Bytes | None = None
        self._name = b""
        self._told = False
        self._segment_bytes = 0
        self._registered_bytes = 0
        self._end = 0
        self._sent: HostUsage | None = None
        self._logged = False
        self._thread = PeriodicThread(self._update)

    def start(self) -> None:
        """Start the thread, as `PeriodicThread.start`, with the device of this one."""
        self._thread.start(device=True)

    def parts(self, place: HostPlace) -> list[torch.Tensor]:
        """Return the bytes of an entry, uint8, in order.

        Raises:
            RuntimeError: this worker has not mapped that memory.
        """
        if self._memory is None or self._name != place.arena:
            raise RuntimeError("an entry is in a host's memory that this worker has not mapped")
        parts = parts_of(self._memory, place.extents, place.size_bytes)
        return [as_tensor(part.data) for part in parts]

    def close(self) -> None:
        self._thread.close()
        self._sender.close()

    def _update(self) -> bool:
        """Do what is due; return whether there is more to do at once."""
        self._connection.settle()
        if self._loader is not None:
            self._loader.report_copies()
        gone = self._connection.arena is None and not self._connect()
        arena, again = self._connection.arena, False
        if self._memory is None:
            if arena is not None and len(arena.memory):
                self._name, self._memory = arena.name, arena.memory
                self._segment_bytes, self._end = arena.segment_bytes, len(arena.memory)
                again = True
        elif arena is not None and arena.name == self._name:
            self._tell()
            again = self._register_next(self._memory)
        elif gone or arena is not None:
            self._unmap()
        self._report()
        return again

    def _connect(self) -> bool:
        """Connect to the server; return False if there is none. One that hangs is not gone."""
        try:
            self._check()
        except StoreUnavailable as error:
            if not self._logged:
                self._logged = True
                logger.warning("no use of the host's memory until its server is back: %s", error)
            return not isinstance(error.__cause__, ConnectionRefusedError | FileNotFoundError)
        self._logged = False
        return True

    def _tell(self) -> None:
        """Report that this worker has mapped the memory, if it can: steps may refer to it then."""
        reader = None if self._loader is None else self._loader.reader
        if reader is not None and not self._told:
            reader.has_mapped(self._name)
            self._told = True

    def _unmap(self) -> None:
        """Withdraw the memory's name; at a later call drop it, if no step may refer to it.

        Not at once: the scheduler's process may see the withdrawal some time after it was written.
        """
        reader = None if self._loader is None else self._loader.reader
        if reader is not None and self._told:
            reader.has_mapped(None)
            self._told = False
            return
        if reader is not None and not reader.has_read_all():
            return
        self._memory, self._registered_bytes, self._end = None, 0, 0
        logger.info("unmapped the memory of the host %s", self._name.hex())

    def _register_next(self, memory: Bytes) -> bool:
        """Register the next segment; return whether there are more."""
        begin = self._registered_bytes
        if begin == self._end:
            return False
        end = min(begin + self._segment_bytes, self._end)
        if register(memory, begin, end):
            self._registered_bytes = end
        else:
            self._end = begin
        if self._registered_bytes == self._end:
            logger.info(
                "mapped %d bytes of the host's memory, %s; %d are registered with CUDA, and copies "
                "of the others go through pinned memory",
                len(memory),
                "to write" if memory.flags.writeable else "to read",
                self._registered_bytes,
            )
        return self._registered_bytes < self._end

    def _report(self) -> None:
        usage = usage_of(self._connection, self._registered_bytes)
        if usage != self._sent and self._sender.send({"host": {str(os.getpid()): [*usage]}}):
            self._sent = usage
