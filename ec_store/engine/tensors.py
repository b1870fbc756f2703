"""Copies of tensors between host memory and the model's device, in a worker."""

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from ec_store.concurrency import DaemonPool
from ec_store.engine.region import RegionReader, SharedRegion

CLOSE_TIMEOUT_S = 10.0

READ_ONLY = 8
"""`cudaHostRegisterReadOnly` of cudaHostRegister, which a device supports if its attribute
`hostRegisterReadOnlySupported` says so."""

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


class HostCopies:
    """Copier to pinned memory, on a thread and a stream of its own.

    A tensor on the device is released when its copy has been made, not when the copy has been used:
    waiting data is in host memory. PyTorch keeps unused pinned memory for later copies.
    """

    def __init__(self) -> None:
        self._pool = DaemonPool(1, "ec-copy")
        self._stream: torch.Stream | None = None

    def start(self, tensor: torch.Tensor) -> HostTensor:
        """Copy a tensor as it is after the work queued on its device so far.

        A tensor on a CPU is not copied. The copy is contiguous.

        Returns:
            Function that waits for the copy and returns it.

        Raises:
            RuntimeError: the device failed, or the thread cannot be started.
        """
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            contiguous: HostTensor = tensor.contiguous
            return contiguous
        output = Output(tensor)
        copied = self._pool.submit(lambda: self._copy(output))
        if copied.cancelled():
            raise RuntimeError("the thread that copies encoder outputs cannot be started")
        return copied.result

    def close(self) -> None:
        """Make the queued copies, for at most `CLOSE_TIMEOUT_S` seconds."""
        self._pool.finish(CLOSE_TIMEOUT_S)

    def _copy(self, output: Output) -> torch.Tensor:
        tensor = output.tensor
        if self._stream is None:
            self._stream = new_stream(tensor.device)
        host = pinned_memory(tensor.nbytes)
        output.copy_to([host], self._stream)
        return host.view(tensor.dtype).view(tensor.shape)


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
    """Reporter of steps with loaded entries, for the thread that runs the model.

    Attributes:
        reader: the page of reports, once this worker has mapped it.
    """

    def __init__(self, reader: int) -> None:
        """Create the loader of the worker of this index, from 0, among those that load entries."""
        self._number = reader
        self._lock = threading.Lock()
        self.reader: RegionReader | None = None
        self._refused = False
        self._copying: deque[tuple[torch.Event, int]] = deque()

    def map_shared(self, shared: SharedRegion) -> None:
        """Map the page of reports, which the scheduler's process shares."""
        if self.reader is not None or self._refused:
            return
        try:
            self.reader = RegionReader(shared.handle, self._number)
        except OSError as error:
            self._refused = True
            logger.warning(
                "worker %d cannot map the memory that the scheduler shares, so entries are sent "
                "with each step: %s. Run both on one machine, as one user, in one PID namespace.",
                self._number,
                error,
            )
        else:
            self.reader.has_read(0)
            logger.info("worker %d has mapped the memory that the scheduler shares", self._number)

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
