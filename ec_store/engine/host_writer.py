"""Writing of encoder outputs from their device into the host's memory."""

from collections.abc import Mapping
from typing import Any

import torch

from ec_store.arena.store import ArenaStore, PlacedEntry
from ec_store.engine.accept import FiniteOnly
from ec_store.engine.tensors import DTYPES, Output, new_stream
from ec_store.keys import EntryKey


class HostWriter:
    """Writer of encoder outputs, from their device into the host's memory."""

    def __init__(self, store: ArenaStore, accept: FiniteOnly) -> None:
        self._store = store
        self._accept = accept
        self._stream: torch.Stream | None = None

    def put(
        self,
        key: EntryKey,
        output: Output,
        modality: str,
        metadata: Mapping[str, Any],
        encode_s: float = 0.0,
    ) -> bool | None:
        """Write an output in place, and store it when its copy has ended.

        Returns:
            False if an entry of this key exists, None if the output is not accepted.

        Raises:
            EntryTooLarge, StoreUnavailable: as `Store.put`.
            RuntimeError: the device failed.
        """
        tensor = output.tensor
        dtype = DTYPES[tensor.dtype]
        write = self._store.begin(key, tensor.nbytes)
        if write is None:
            return False
        try:
            if tensor.device.type != "cpu" and self._stream is None:
                self._stream = new_stream(tensor.device)
            output.copy_to([torch.from_numpy(part) for part in write.parts], self._stream)
            parts = [part.data.toreadonly() for part in write.parts]
            shape = tuple(tensor.shape)
            entry = PlacedEntry(dtype, shape, modality, metadata, write.place, parts, encode_s)
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
