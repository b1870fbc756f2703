"""KV events of one engine, in their order: which blocks it has. No I/O.

vLLM publishes batches of events: frames of a topic, a sequence number and msgpack. After any fault,
the content of the cache is estimated as without events, until events name links again.

This module needs the extra `kv-events`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec

from epd.kv_events.blocks import BlockMap
from epd.routing.prefix import MAX_LINKS

GPU = frozenset({None, "GPU"})
"""Media of the blocks that count. Blocks that are offloaded to other memory must be loaded back."""

WHOLE = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of attention of which a hit needs all blocks. A model with several kinds reports the
blocks of each, and removes those of a sliding window early."""

MAX_CHANGES = 4 * MAX_LINKS
"""Upper bound of the changed links that wait for the event loop."""

EMPTIED = frozenset({"cleared", "restarted"})
"""Reasons after which an engine has none of its earlier blocks."""

NUMBER_BYTES = 8
"""Size of a sequence number."""

HASH = 2**64 - 1

BlockHash = bytes | int


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """Event: the engine has stored blocks that follow each other."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    block_size: Annotated[int, msgspec.Meta(gt=0, le=2**20)]
    medium: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """Event: the engine has removed blocks."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """Event: the engine has removed all blocks."""


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """Message of an engine. Later fields are ignored."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


_DECODER = msgspec.msgpack.Decoder(EventBatch)


class FeedReport(NamedTuple):
    """News of one engine for the event loop.

    Attributes:
        fault: reason why earlier reports no longer hold; empty for none.
        changes: links since then, as of `BlockMap.take_changes`.
        counts: number of events and of faults since the last report.
    """

    fault: str
    changes: Mapping[int, int | None]
    counts: Mapping[str, int]


class EventFeed:
    """Events of one engine, in their order. Belongs to one thread."""

    def __init__(self, max_changes: int = MAX_CHANGES) -> None:
        self._max_changes = max_changes
        self._blocks = BlockMap()
        self._last = -1
        self._next: int | None = None
        self._group: int | None = None
        self._fault = ""
        self._counts: Counter[str] = Counter()

    def receive(self, frames: Sequence[bytes]) -> None:
        """Handle a message: topic, number and batch. A malformed one is a fault."""
        if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:  # noqa: PLR2004
            self.record_fault("malformed")
            return
        number = int.from_bytes(frames[1], "big")
        if number <= self._last:
            self.record_fault("restarted")
        elif self._next is not None and number != self._next:
            self.record_fault("gap")
        self._last, self._next = number, number + 1
        self._apply_batch(frames[2])
        if self._blocks.change_count > self._max_changes:  # the event loop takes no reports
            self.record_fault("gap")

    def record_fault(self, fault: str) -> None:
        """Forget the blocks: events are missing."""
        self._counts[fault] += 1
        if self._fault not in EMPTIED:
            self._fault = fault
        self._next = None
        self._blocks.clear_blocks()

    def take_report(self) -> FeedReport | None:
        """Return the news since the last report; None if there are none."""
        changes = self._blocks.take_changes()
        if not (changes or self._counts):
            return None
        report = FeedReport(self._fault, changes, self._counts)
        self._fault, self._counts = "", Counter()
        return report

    def _apply_batch(self, batch: bytes) -> None:
        try:
            events = _DECODER.decode(batch).events
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            self.record_fault("malformed")
            return
        for event in events:
            match event:
                case BlockStored() if self._is_followed(event):
                    self._counts["stored"] += 1
                    parent = event.parent_block_hash
                    self._blocks.record_stored(
                        [*map(_number, event.block_hashes)],
                        None if parent is None else _number(parent),
                        event.block_size,
                        event.session_id,
                    )
                case BlockRemoved() if event.medium in GPU and event.group_idx == self._group:
                    self._counts["removed"] += 1
                    self._blocks.record_removed(map(_number, event.block_hashes))
                case AllBlocksCleared():
                    self._counts["cleared"] += 1
                    self._blocks.clear_blocks()
                    self._fault = "cleared"

    def _is_followed(self, event: BlockStored) -> bool:
        """Return whether blocks count: those of the first group that has all blocks of a prompt."""
        if event.medium not in GPU or event.kv_cache_spec_kind not in WHOLE:
            return False
        if self._group is None:
            self._group = event.group_idx
        return event.group_idx == self._group


def _number(block: BlockHash) -> int:
    """Return the last 64 bits of a hash, as with `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES`."""
    return block & HASH if isinstance(block, int) else int.from_bytes(block[-8:], "big")
