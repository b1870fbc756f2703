"""Tensors of bytes in host memory, where the model runs."""

from collections.abc import Iterable

import numpy as np
import torch

from ec_store.device.copies import pinned

DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class _Writable:
    """Bytes that numpy takes for writable: torch warns of others. Nothing writes to these."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        array = np.frombuffer(data, np.uint8)
        self.__array_interface__ = {
            **array.__array_interface__,
            "data": (array.ctypes.data, False),
        }


def as_tensor(data: memoryview) -> torch.Tensor:
    """Return a tensor of bytes that shares their memory and keeps it alive. Nothing may write."""
    return torch.from_numpy(np.asarray(_Writable(data)))


def to_device(raw: torch.Tensor, dtype: str, shape: Iterable[int]) -> torch.Tensor:
    """Return a tensor of these bytes on the device where the model runs.

    The copy is asynchronous, on the stream of the step that uses it.

    Args:
        raw: the bytes, uint8. Pinned memory is copied from as it is, and must not change until the
            copy is done; other memory goes through pinned memory.
        dtype: of the tensor, as `Entry.dtype`.
        shape: of the tensor.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or not raw.is_pinned():
        host = pinned(raw.nbytes) if device else torch.empty(raw.nbytes, dtype=torch.uint8)
        raw = host.copy_(raw)
    tensor = raw.view(TORCH_DTYPES[dtype]).reshape(*shape)
    return tensor if device is None else tensor.to(device, non_blocking=True)
