"""Checksums of entries, which a thread of the server computes after their writes.

An entry has no checksum until its turn comes, less than a second after its write. Until then it is
read without a check, and `ec-store verify` and `ls` take it for sound. If more than `MAX_UNHASHED`
entries wait, an entry gets its checksum after the next time that it is read. A copy of an entry in
another store gets a checksum of its own, from the bytes that are copied.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import xxhash

from ec_store.arena.index import ArenaIndex, Slot
from ec_store.arena.memory import Bytes, parts_of

EVERY_S = 0.25
"""Interval in seconds at which new entries are hashed: not at once, because an entry is mostly read
right after its write, and both take the bandwidth of the memory."""

BATCH_BYTES = 16 * 2**20
"""Bytes of entries that are handed to the thread at once, or one larger entry."""


class Checksums:
    """Computation of the checksums of an index, in the order of the writes."""

    def __init__(self, index: ArenaIndex, memory: Bytes) -> None:
        """Create the computation over a mapped memory, which `close` unmaps."""
        self._index = index
        self._memory = memory
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start on the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """End after the entries that are being hashed."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._memory = np.empty(0, np.uint8)

    async def _run(self) -> None:
        # The entries need no pin: the bytes of a slot are reused only after it was removed, and the
        # checksum of a removed slot is never read. So no write waits for the thread.
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "ec-store-checksum") as thread:
            while True:
                await asyncio.sleep(EVERY_S)
                while batch := self._take_batch():
                    checksums = await loop.run_in_executor(thread, self._compute, batch)
                    for slot, checksum in zip(batch, checksums, strict=True):
                        slot.checksum = checksum

    def _take_batch(self) -> list[Slot]:
        batch: list[Slot] = []
        left_bytes, unhashed = BATCH_BYTES, self._index.unhashed
        while unhashed and left_bytes > 0:
            slot, _ = unhashed.popitem(last=False)
            if slot.checksum:  # it was pinned while it was hashed
                continue
            batch.append(slot)
            left_bytes -= slot.size_bytes
        return batch

    def _compute(self, batch: Sequence[Slot]) -> list[str]:
        return [
            checksum_of(parts_of(self._memory, slot.extents, slot.size_bytes)) for slot in batch
        ]


def checksum_of(parts: Sequence[Bytes]) -> str:
    """Return the xxh3-64 of bytes in parts, 16 hexadecimal digits.

    xxhash computes it without the interpreter's lock.
    """
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part.data)
    return digest.hexdigest()
