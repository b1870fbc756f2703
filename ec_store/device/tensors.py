"""Conversion of bytes in host memory to tensors on the model's device."""

from collections.abc import Iterable

import numpy as np
import torch

from ec_store.device.copies import pinned

DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class _Writable:
    """Wrapper that presents bytes to numpy as writable, although no code writes to them.

    torch warns of read-only arrays.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        array = np.frombuffer(data, np.uint8)
        self.__array_interface__ = {
            **array.__array_interface__,
            "data": (array.ctypes.data, False),
        }


def as_tensor(data: memoryview) -> torch.Tensor:
    """Return a tensor that shares the bytes' memory and keeps it alive. It must not be written."""
    return torch.from_numpy(np.asarray(_Writable(data)))


def to_device(raw: torch.Tensor, dtype: str, shape: Iterable[int]) -> torch.Tensor:
    """Return a tensor of these bytes on the device of the model.

    The copy is asynchronous, on the stream of the step that uses it.

    Args:
        raw: bytes, uint8. Pinned memory is copied directly, and must not change until the copy is
            done; other memory is copied to pinned memory first.
        dtype: dtype of the tensor, as `Entry.dtype`.
        shape: shape of the tensor.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or not raw.is_pinned():
        host = pinned(raw.nbytes) if device else torch.empty(raw.nbytes, dtype=torch.uint8)
        raw = host.copy_(raw)
    tensor = raw.view(TORCH_DTYPES[dtype]).reshape(*shape)
    return tensor if device is None else tensor.to(device, non_blocking=True)
