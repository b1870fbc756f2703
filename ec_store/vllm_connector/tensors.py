"""Tensors between the device and host memory."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def to_device(raw: np.ndarray[Any, Any], dtype: str, shape: Iterable[int]) -> torch.Tensor:
    """A tensor of these bytes where the model runs; through pinned memory to an accelerator.

    The copy is asynchronous, on the stream of the step that uses it.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    host = torch.empty(raw.nbytes, dtype=torch.uint8, pin_memory=device is not None)
    host.numpy()[:] = raw
    tensor = host.view(TORCH_DTYPES[dtype]).reshape(*shape)
    return tensor if device is None else tensor.to(device, non_blocking=True)


class HostCopies:
    """Copies from the device that hold up neither the model nor each other."""

    def __init__(self) -> None:
        """Nothing is made before the first copy: the device may not be there yet."""
        self._stream: torch.Stream | None = None

    def later(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """What makes the copy, to be called on another thread.

        The copy is of the tensor as the work that is queued now leaves it: contiguous, in pinned
        memory, made on a stream of its own. On a CPU it is the tensor itself.
        """
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            contiguous: Callable[[], torch.Tensor] = tensor.contiguous
            return contiguous
        event = torch.Event(tensor.device)
        event.record(torch.accelerator.current_stream(tensor.device))
        return lambda: self._copied(tensor, event)

    def _copied(self, tensor: torch.Tensor, event: torch.Event) -> torch.Tensor:
        if self._stream is None:
            self._stream = torch.Stream(tensor.device)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with self._stream as stream:
            stream.wait_event(event)
            host.copy_(tensor, non_blocking=True)
        self._stream.synchronize()
        return host
