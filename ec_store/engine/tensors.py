"""Copies of tensors between host memory and the model's device, in a worker."""

import logging
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from ec_store.engine.region import Place, RegionReader, SharedRegion
from ec_store.engine.slots import Slots
from ec_store.engine.threads import start_thread

CLOSE_TIMEOUT_S = 10.0

DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

logger = logging.getLogger("vllm.ec_store")

HostTensor = Callable[[], torch.Tensor]
"""Function that waits for the copy and returns it, on any thread."""


class Output:
    """Encoder output, as it is after the work queued on its device so far."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Keep the tensor until it is copied.

        Raises:
            RuntimeError: the device failed.
        """
        self.tensor = tensor.detach().contiguous()
        self._ready: torch.Event | None = None
        device = self.tensor.device
        if device.type != "cpu":
            self._ready = torch.Event(device)
            self._ready.record(torch.accelerator.current_stream(device))

    def copy_to(self, parts: Sequence[torch.Tensor], stream: torch.Stream | None) -> None:
        """Copy the tensor's bytes to parts of host memory, in order, and wait for the copies.

        Devices write registered memory directly, and other memory through memory of the driver.

        Args:
            parts: host memory, uint8, of the tensor's size.
            stream: stream of the tensor's device; None on a CPU.

        Raises:
            RuntimeError: the device failed. It may still be writing.
        """
        raw, begin = self.tensor.reshape(-1).view(torch.uint8), 0
        with stream or nullcontext():
            if stream is not None and self._ready is not None:
                stream.wait_event(self._ready)
            for part in parts:
                part.copy_(raw[begin : begin + part.nbytes], non_blocking=True)
                begin += part.nbytes
        if stream is not None:
            stream.synchronize()


class _Job(NamedTuple):
    """One copy from the device to host memory.

    Attributes:
        offset: offset in the ring; None if the tensor is larger than the ring.
    """

    output: Output
    offset: int | None
    copied: Future[torch.Tensor]


class HostCopies:
    """Copier to a ring of pinned memory, on a thread and a stream of its own.

    A tensor on the device is released when its copy has been made, not when the copy has been used:
    waiting data is in host memory. The first copy allocates the ring, on the thread. The ring is
    pageable memory if the driver refuses to pin it.
    """

    def __init__(self, size_bytes: int) -> None:
        """Create the copier with a ring of this size; a single tensor may be larger."""
        self._slots = Slots(size_bytes)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ring: np.ndarray[Any, Any] | None = None

    def start(self, tensor: torch.Tensor) -> HostTensor | None:
        """Copy a tensor as it is after the work queued on its device so far.

        A tensor on a CPU is not copied. The copy is contiguous; its memory in the ring is free
        again after its last view is deleted.

        Returns:
            Function that waits for the copy and returns it; None if the ring has no room.

        Raises:
            RuntimeError: the device failed, or the thread cannot be started.
        """
        tensor, device = tensor.detach(), tensor.device
        if device.type == "cpu":
            contiguous: HostTensor = tensor.contiguous
            return contiguous
        if self._thread is None:
            self._thread = start_thread(lambda: self._run(device), "ec-copy")
        offset = self._slots.take_slot(tensor.nbytes)
        if offset is None and tensor.nbytes <= self._slots.size_bytes:
            return None
        try:
            output = Output(tensor)
        except RuntimeError:
            if offset is not None:
                self._slots.free_slot(offset)
            raise
        copied: Future[torch.Tensor] = Future()
        self._jobs.put(_Job(output, offset, copied))
        return copied.result

    def close(self) -> None:
        """Make the queued copies, for at most `CLOSE_TIMEOUT_S` seconds."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self, device: torch.device) -> None:
        # All that may fail is in the `try`: the writer waits for each copy without a deadline.
        stream: torch.Stream | None = None
        while (job := self._jobs.get()) is not None:
            host: torch.Tensor | None = None
            try:
                stream = stream or new_stream(device)
                host = self._place(job.output.tensor, job.offset)
                job.output.copy_to([host.reshape(-1).view(torch.uint8)], stream)
            except Exception as error:  # noqa: BLE001 - the future raises it
                if host is None and job.offset is not None:
                    self._slots.free_slot(job.offset)
                job.copied.set_exception(error.with_traceback(None))  # it would hold the place
            else:
                job.copied.set_result(host)
            # Dropped before the wait for the next job: they refer to the tensor and to its place.
            del job, host

    def _place(self, tensor: torch.Tensor, offset: int | None) -> torch.Tensor:
        """Return memory for a copy, which becomes free again after its last view is deleted."""
        if offset is None:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        if self._ring is None:
            self._ring = pinned_memory(self._slots.size_bytes).numpy()
        place = self._ring[offset : offset + tensor.nbytes]
        host = torch.from_numpy(place).view(tensor.dtype).view(tensor.shape)
        # The tensor and all views of it refer to this array.
        weakref.finalize(place, self._slots.free_slot, offset)
        return host


def new_stream(device: torch.device) -> torch.Stream:
    """Return a new stream of a device, and set the device as this thread's.

    A thread starts on device 0. Leaving a stream's context restores the thread's device, and in
    CUDA that creates a context there: some 0.4 GB of another rank's memory.
    """
    torch.accelerator.set_device_index(device.index)
    return torch.Stream(device)


def pinned_memory(size_bytes: int) -> torch.Tensor:
    """Return pinned host memory, which a device reads and writes directly.

    If the driver refuses (limits of locked memory, no device), the memory is pageable, which is
    slower.
    """
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return torch.empty(size_bytes, dtype=torch.uint8)


class _Writable:
    """Wrapper that presents bytes to numpy as writable: torch warns of read-only arrays."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        array = np.frombuffer(data, np.uint8)
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def as_tensor(data: memoryview) -> torch.Tensor:
    """Return a tensor that shares the bytes' memory and keeps it alive. It must not be written."""
    return torch.from_numpy(np.asarray(_Writable(data)))


def to_device(parts: Sequence[torch.Tensor], dtype: str, shape: Iterable[int]) -> torch.Tensor:
    """Return a tensor of these bytes on the device of the model.

    The copies are asynchronous, on the stream of the step that uses it.

    Args:
        parts: bytes, uint8, in order. Pinned memory is copied directly, and must not change until
            the copy is done; other memory is copied to pinned memory first.
        dtype: dtype of the tensor, as `Entry.dtype`.
        shape: shape of the tensor.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    size_bytes = sum(part.nbytes for part in parts)
    raw = torch.empty(size_bytes, dtype=torch.uint8, device=device or "cpu")
    begin = 0
    for part in parts:
        source = part
        if device is not None and not part.is_pinned():
            source = pinned_memory(part.nbytes).copy_(part)
        raw[begin : begin + part.nbytes].copy_(source, non_blocking=True)
        begin += part.nbytes
    return raw.view(TORCH_DTYPES[dtype]).reshape(*shape)


class Loader:
    """Loader of a step's entries, for the thread that runs the model.

    Attributes:
        reader: the shared memory, once this worker has mapped it.
    """

    def __init__(self, reader: int) -> None:
        """Create the loader of the worker of this index, from 0, among those that load entries."""
        self._number = reader
        self._lock = threading.Lock()
        self.reader: RegionReader | None = None
        self._mapping: threading.Thread | None = None
        self._copying: deque[tuple[torch.Event, int]] = deque()

    def map_shared(self, shared: SharedRegion) -> None:
        """Map the shared memory on a thread: pinning pages takes longer than a step.

        Until all workers have mapped it, entries come with the step.

        Raises:
            RuntimeError: the thread cannot be started; the next call tries again.
        """
        if self._mapping is None:
            self._mapping = start_thread(lambda: self._map(shared), "ec-map", device=True)

    def view(self, place: Place) -> torch.Tensor:
        """Return bytes in the shared memory.

        Raises:
            RuntimeError: this worker has not mapped it.
        """
        if self.reader is None:
            raise RuntimeError("an entry is in shared memory that this worker has not mapped")
        return self.reader.view(place)

    def finish(self, number: int) -> None:
        """Report steps up to this one as loaded, once their copies have been made."""
        if self.reader is None:
            return
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is None:
            self.reader.has_read(number)
            return
        with self._lock:
            if not self._copying or self._copying[-1][1] < number:
                event = torch.Event(device)
                event.record(torch.accelerator.current_stream(device))
                self._copying.append((event, number))

    def report_copies(self) -> None:
        """Report the copies that have been made since the last call. Thread-safe."""
        with self._lock:
            while self._copying and self._copying[0][0].query():
                _, number = self._copying.popleft()
                if self.reader is not None:
                    self.reader.has_read(number)

    def _map(self, shared: SharedRegion) -> None:
        try:
            reader = RegionReader(shared.handle, self._number)
        except OSError as error:
            logger.warning(
                "worker %d cannot map the memory that the scheduler shares, so entries are sent "
                "with each step: %s. Run both on one machine, as one user, in one PID namespace.",
                self._number,
                error,
            )
            return
        logger.info(
            "worker %d has mapped %d bytes that the scheduler shares, registered with CUDA: %s",
            self._number,
            shared.handle.size_bytes,
            reader.registered,
        )
        # Set before the report: after all workers have reported, steps refer to it.
        self.reader = reader
        reader.has_read(0)
