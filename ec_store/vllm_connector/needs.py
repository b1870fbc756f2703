"""Items that requests need from the encoder cache, in the scheduler's side of a consumer."""

import enum
import time
from dataclasses import dataclass, field
from typing import Any, Self

from ec_store.fetcher import FetchState


class How(enum.Enum):
    """State of an item of a request."""

    OPEN = enum.auto()
    WAITING = enum.auto()
    """State while the entry is being fetched."""
    PINNED = enum.auto()
    """State while the entry is claimed in memory for this item."""
    LOCAL = enum.auto()
    """This engine encodes the item, unless another request has its entry by then."""
    COMPUTED = enum.auto()
    """State after the tokens of the item are computed."""


@dataclass(slots=True, eq=False)
class Part:
    """Media item of one request.

    A client may give two images one name: items of one identifier may differ in their tokens.

    Attributes:
        end: number of computed tokens of the request from which the item is no longer needed.
        claimed: whether the item has a claim on its entry, or on the fetch of it.
    """

    feature: Any
    identifier: str
    tokens: int
    end: int
    how: How = How.OPEN
    claimed: bool = False

    @classmethod
    def from_feature(cls, feature: Any) -> Self:
        """Return the item of one of vLLM's features."""
        where = feature.mm_position
        end = where.offset + where.length
        return cls(feature, feature.identifier, where.get_num_embeds(), end)


@dataclass(slots=True, eq=False)
class Needs:
    """Items of a request, and how far they are.

    Attributes:
        parts: items, in the order in which their tokens are computed.
        asked_s: time of the first call for this request, monotonic.
        preemptions: number of its preemptions at that time.
        passed: number of leading items with computed tokens.
        computed: end of the last of these items. With fewer computed tokens, some were lost.
        admitted: whether there was room for all of its entries.
        failed: whether the request is to fail.
        waiting: number of its entries that are being fetched.
        arrived: items with a result of their fetch since the last call for this request.
    """

    parts: list[Part]
    asked_s: float
    preemptions: int
    passed: int = 0
    computed: int = 0
    admitted: bool = False
    failed: bool = False
    waiting: int = 0
    arrived: list[tuple[Part, FetchState]] = field(default_factory=list)

    @classmethod
    def needs_of(cls, request: Any) -> Self:
        """Return the needs of one of vLLM's requests, at the first call for it."""
        parts = sorted(map(Part.from_feature, request.mm_features), key=lambda part: part.end)
        return cls(parts, time.monotonic(), request.num_preemptions)

    def open(self) -> list[Part]:
        """Return items that are needed and not settled."""
        return [part for part in self.parts[self.passed :] if part.how is How.OPEN]

    def has_changed(self, request: Any, computed: int) -> bool:
        """Return whether a request has lost computed tokens, or its session has more items."""
        return (
            computed < self.computed
            or request.num_preemptions != self.preemptions
            or len(request.mm_features) != len(self.parts)
        )
