"""Memory of the host in the processes of an engine: mapped, registered with CUDA, written directly.

Each process has one connection to the server (`ec_store.arena`). The scheduler's connection pins
entries, and a worker's connection holds the writes that it has begun. A thread of each process
looks after the connection, so that no step waits for the server.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ec_store.arena.connection import ArenaConnection
from ec_store.arena.memory import Bytes, parts_of
from ec_store.arena.store import ArenaStore, HostPlace
from ec_store.engine.accept import FiniteOnly
from ec_store.engine.backchannel import Sender
from ec_store.engine.region import register
from ec_store.engine.tensors import DTYPES, Loader, Output, as_tensor, new_stream
from ec_store.entry import EntryInfo
from ec_store.errors import StoreUnavailable
from ec_store.keys import EntryKey

logger = logging.getLogger("vllm.ec_store")

TURN_S = 0.5
"""Seconds between two looks at the connection."""


CLOSE_S = 2.0


class Turns:
    """Thread that repeats a call every `TURN_S` seconds, and at once while it returns True."""

    def __init__(self, call: Callable[[], bool]) -> None:
        self._call = call
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._logged = False

    def start(self, *, device: bool = False) -> None:
        """Start the thread, unless it was started before.

        Args:
            device: whether it uses the device of this thread. The scheduler must use none: that
                would create a context, some 0.4 GB of a rank's memory.

        Raises:
            RuntimeError: the thread cannot be started; the next call tries again.
        """
        if self._thread is None and not self._closed.is_set():
            index: int | None = None
            if device and torch.accelerator.current_accelerator(check_available=True):
                index = torch.accelerator.current_device_index()
            thread = threading.Thread(target=self._run, args=(index,), name="ec-host", daemon=True)
            thread.start()
            self._thread = thread

    def close(self) -> None:
        """End the thread after its present call, for which this waits `CLOSE_S` seconds at most."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _run(self, device_index: int | None) -> None:
        if device_index is not None:
            torch.accelerator.set_device_index(device_index)
        while not self._closed.is_set():
            again = False
            try:
                again = self._call()
            except Exception:
                if not self._logged:
                    self._logged = True
                    logger.exception("the thread of the host's memory failed; it goes on")
            if not again:
                self._closed.wait(TURN_S)


class Usage(NamedTuple):
    """What a process holds of the host's memory.

    Attributes:
        connections: connections to the server, each with one descriptor.
        mapped_bytes: mapped bytes, earlier memories that are still read included.
        registered_bytes: bytes that are registered with CUDA, and so locked.
    """

    connections: int = 0
    mapped_bytes: int = 0
    registered_bytes: int = 0


def usage_of(connection: ArenaConnection, registered_bytes: int = 0) -> Usage:
    """Return what this process holds through a connection."""
    connected = int(connection.arena is not None)
    return Usage(connected, connection.mapped_bytes, registered_bytes)


def host_gauges(usages: Iterable[Usage]) -> dict[str, float]:
    """Return the sums over the processes of an engine, by the names of their metrics."""
    sums = Usage(*map(sum, zip(*usages, strict=True)))
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
            sender: sender of the `Usage`, which this object closes.
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
        self._sent: Usage | None = None
        self._logged = False
        self._turns = Turns(self._turn)

    def start(self) -> None:
        """Start the thread, as `Turns.start`, with the device of this one."""
        self._turns.start(device=True)

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
        self._turns.close()
        self._sender.close()

    def _turn(self) -> bool:
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
        """Withdraw the memory's name; at a later turn drop it, if no step may refer to it.

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


class HostOutput(NamedTuple):
    """Encoder output that is to be written, with modality and metadata of its item."""

    output: Output
    modality: str
    metadata: Mapping[str, Any]


class HostWriter:
    """Destination of a `Writer`: outputs are copied from their device into the host's memory."""

    def __init__(self, store: ArenaStore, accept: FiniteOnly) -> None:
        self._store = store
        self._accept = accept
        self._stream: torch.Stream | None = None

    def lease(self, keys: Sequence[EntryKey], seconds: float) -> Sequence[EntryInfo | None]:
        """Look entries up and protect them, as `Store.lease`."""
        return self._store.lease(keys, seconds)

    def put(self, key: EntryKey, made: HostOutput) -> bool | None:
        """Write an output in place, and store it when its copy has ended.

        Returns:
            False if an entry of this key exists, None if the output is not accepted.

        Raises:
            EntryTooLarge, StoreUnavailable: as `Store.put`.
            RuntimeError: the device failed.
        """
        tensor = made.output.tensor
        dtype = DTYPES[tensor.dtype]
        write = self._store.begin(key, tensor.nbytes)
        if write is None:
            return False
        try:
            if tensor.device.type != "cpu" and self._stream is None:
                self._stream = new_stream(tensor.device)
            made.output.copy_to([torch.from_numpy(part) for part in write.parts], self._stream)
            entry = write.entry(dtype, tuple(tensor.shape), made.modality, made.metadata)
            accepted = self._accept(entry)
        except BaseException:
            if self._has_ended():
                write.abort()
            raise
        if not accepted:
            write.abort()
            return None
        return write.commit(entry)

    def _has_ended(self) -> bool:
        """Return whether no copy is running.

        A device that fails may still be writing: the place of the write stays until this process
        has ended.
        """
        try:
            if self._stream is not None:
                self._stream.synchronize()
        except RuntimeError:
            return False
        return True
