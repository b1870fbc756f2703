"""Loading of a step's entries onto the device, in a worker."""

import logging
import threading
from collections import deque
from collections.abc import Iterable

import torch

from ec_store.device.region import Place, RegionReader, Shared
from ec_store.device.tensors import to_device

logger = logging.getLogger("vllm.ec_store")


class Loader:
    """Loader of a step's entries, for the thread that runs the model."""

    def __init__(self, reader: int) -> None:
        """Create the loader; `share` maps the shared memory.

        Args:
            reader: index of this worker among those that read a step's entries, from 0.
        """
        self._number = reader
        self._reader: RegionReader | None = None
        self._mapping: threading.Thread | None = None
        self._copying: deque[tuple[torch.Event, int]] = deque()

    def share(self, shared: Shared) -> None:
        """Map the shared memory on a thread: pinning pages takes longer than a step.

        Until all workers have mapped it, entries come with the step.
        """
        if self._mapping is None:
            device = torch.accelerator.current_accelerator(check_available=True)
            index = torch.accelerator.current_device_index() if device else None
            self._mapping = threading.Thread(
                target=self._map, args=(shared, index), name="ec-map", daemon=True
            )
            self._mapping.start()

    def load(self, raw: torch.Tensor | Place, dtype: str, shape: Iterable[int]) -> torch.Tensor:
        """Return an entry as a tensor on the device; the copy is asynchronous.

        Args:
            raw: bytes of the entry, or their place in the shared memory.
            dtype: dtype, as `Entry.dtype`.
            shape: shape of the tensor.

        Raises:
            RuntimeError: the device failed, or this worker has not mapped the shared memory.
        """
        if not isinstance(raw, Place):
            return to_device(raw, dtype, shape)
        if self._reader is None:
            raise RuntimeError("an entry is in shared memory that this worker has not mapped")
        return to_device(self._reader.view(raw), dtype, shape)

    def finish(self, number: int) -> None:
        """Report steps up to this one as loaded, once their copies have been made."""
        if self._reader is None:
            return
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is None:
            self._reader.has_read(number)
        elif not self._copying or self._copying[-1][1] < number:
            event = torch.Event(device)
            event.record(torch.accelerator.current_stream(device))
            self._copying.append((event, number))

    def poll(self) -> None:
        """Report the copies that have been made since the last call."""
        while self._copying and self._copying[0][0].query():
            _, number = self._copying.popleft()
            if self._reader is not None:
                self._reader.has_read(number)

    def _map(self, shared: Shared, device_index: int | None) -> None:
        if device_index is not None:
            torch.accelerator.set_device_index(device_index)
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
        self._reader = reader
        reader.has_read(0)
