"""Copies of a device's tensors to host memory, which block neither the model nor each other."""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import torch

from ec_store.device.slots import Slots

CLOSE_TIMEOUT_S = 10.0

HostTensor = Callable[[], torch.Tensor]
"""Function that waits for the copy and returns it, on any thread."""


class _Job(NamedTuple):
    """One copy from the device to host memory.

    Attributes:
        tensor: tensor on the device.
        ready: event that fires when the tensor has been computed.
        offset: offset in the ring; None if the tensor is larger than the ring.
        copied: future of the copy.
    """

    tensor: torch.Tensor
    ready: torch.Event
    offset: int | None
    copied: Future[torch.Tensor]


class HostCopies:
    """Copier to a ring of pinned memory, on a thread and a stream of its own.

    A tensor on the device is released when its copy has been made, not when the copy has been used:
    waiting data is in host memory. The first copy allocates the ring, on the thread. The ring is
    pageable memory if the driver refuses to pin it.
    """

    def __init__(self, size_bytes: int) -> None:
        """Create the copier without memory: on a CPU no tensor is copied.

        Args:
            size_bytes: host memory for copies. A single tensor may be larger.
        """
        self._slots = Slots(size_bytes)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ring: np.ndarray[Any, Any] | None = None

    def start(self, tensor: torch.Tensor) -> HostTensor | None:
        """Copy a tensor as it is after the work queued on its device so far.

        Its memory in the ring is free again after the last view of the copy is deleted.

        Args:
            tensor: tensor on any device. On a CPU it is not copied.

        Returns:
            Function that waits for the copy and returns it, contiguous; None if the ring has no
            room.
        """
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            contiguous: HostTensor = tensor.contiguous
            return contiguous
        offset = self._slots.take(tensor.nbytes)
        if offset is None and tensor.nbytes <= self._slots.size_bytes:
            return None
        ready = torch.Event(tensor.device)
        ready.record(torch.accelerator.current_stream(tensor.device))
        copied: Future[torch.Tensor] = Future()
        self._jobs.put(_Job(tensor, ready, offset, copied))
        if self._thread is None:
            thread = threading.Thread(
                target=self._run, args=(tensor.device,), name="ec-copy", daemon=True
            )
            thread.start()
            self._thread = thread
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
            try:
                stream = stream or _stream(device)
                host = self._place(job)
                copy(job, host, stream)
            except Exception as error:  # noqa: BLE001 - the future raises it
                job.copied.set_exception(error)
            else:
                job.copied.set_result(host)
                del host
            # Dropped before the wait for the next job: it refers to the tensor.
            del job

    def _place(self, job: _Job) -> torch.Tensor:
        """Return memory for a copy, which becomes free again after its last view is deleted."""
        tensor, offset = job.tensor, job.offset
        if offset is None:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        if self._ring is None:
            self._ring = pinned(self._slots.size_bytes).numpy()
        place = self._ring[offset : offset + tensor.nbytes]
        # The tensor and all views of it refer to this array.
        weakref.finalize(place, self._slots.give, offset)
        return torch.from_numpy(place).view(tensor.dtype).view(tensor.shape)


def _stream(device: torch.device) -> torch.Stream:
    """Return a new stream of a device, and set the device as this thread's.

    A thread starts on device 0. Leaving a stream's context restores the thread's device, and in
    CUDA that creates a context there: some 0.4 GB of another rank's memory.
    """
    torch.accelerator.set_device_index(device.index)
    return torch.Stream(device)


def copy(job: _Job, host: torch.Tensor, stream: torch.Stream) -> None:
    """Make a copy on a stream, and wait for it."""
    done = torch.Event(job.tensor.device)
    with stream:
        stream.wait_event(job.ready)
        host.copy_(job.tensor, non_blocking=True)
        done.record(stream)
    done.synchronize()


def pinned(size_bytes: int) -> torch.Tensor:
    """Return pinned host memory, which a device reads and writes directly.

    If the driver refuses (limits of locked memory, no device), the memory is pageable, which is
    slower.
    """
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return torch.empty(size_bytes, dtype=torch.uint8)
