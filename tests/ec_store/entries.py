from typing import Any

from ec_store import Entry
from ec_store.entry import payload_bytes


def entry(
    fill: int = 1, shape: tuple[int, ...] = (3, 4), dtype: str = "BF16", **more: Any
) -> Entry:
    data = bytes([fill % 256]) * payload_bytes(dtype, shape)
    fields = {"modality": "image", "metadata": {"image_grid_thw": [1, 2, 2]}} | more
    return Entry(memoryview(data), dtype, shape, **fields)
