"""What requests need of the encoder cache, as the scheduler's side of a consumer keeps it."""

import enum
import time
from dataclasses import dataclass, field
from typing import Any, Self

from ec_store.fetcher import State


class How(enum.Enum):
    """What becomes of an item."""

    OPEN = enum.auto()
    WAITING = enum.auto()
    """Its entry is on its way."""
    PINNED = enum.auto()
    """Its entry is held in memory for it."""
    LOCAL = enum.auto()
    """This engine encodes it, unless another request has its entry by then."""
    COMPUTED = enum.auto()
    """Its tokens are computed."""


@dataclass(slots=True, eq=False)
class Part:
    """One media item of one request.

    A client may give two pictures one name: items of one identifier may differ in their tokens.

    Attributes:
        end: the item is needed until this many tokens of the request are computed.
        claimed: whether it has a claim on its entry, or on the fetch of it.
    """

    feature: Any
    identifier: str
    tokens: int
    end: int
    how: How = How.OPEN
    claimed: bool = False

    @classmethod
    def of(cls, feature: Any) -> Self:
        """Return the item of a feature of vLLM's."""
        where = feature.mm_position
        end = where.offset + where.length
        return cls(feature, feature.identifier, where.get_num_embeds(), end)


@dataclass(slots=True, eq=False)
class Needs:
    """What a request waits for.

    Attributes:
        parts: its items, in the order in which their tokens are computed.
        asked_s: when it was first asked for, monotonic.
        preemptions: how often it had been preempted by then.
        passed: how many of the first items are computed.
        computed: where the last one of these ends. With fewer computed tokens, some were lost.
        admitted: whether there was room for all of its entries.
        failed: whether it is to fail.
        waiting: how many of its entries are on their way.
        arrived: items whose entries have come since it was last asked for, or are missing.
    """

    parts: list[Part]
    asked_s: float
    preemptions: int
    passed: int = 0
    computed: int = 0
    admitted: bool = False
    failed: bool = False
    waiting: int = 0
    arrived: list[tuple[Part, State]] = field(default_factory=list)

    @classmethod
    def of(cls, request: Any) -> Self:
        """Return what a request of vLLM's needs that is asked for first now."""
        parts = sorted(map(Part.of, request.mm_features), key=lambda part: part.end)
        return cls(parts, time.monotonic(), request.num_preemptions)

    def open(self) -> list[Part]:
        """Return items that are needed and not settled."""
        return [part for part in self.parts[self.passed :] if part.how is How.OPEN]

    def has_changed(self, request: Any, computed: int) -> bool:
        """Tell whether a request has lost computed tokens, or its session brings further items."""
        return (
            computed < self.computed
            or request.num_preemptions != self.preemptions
            or len(request.mm_features) != len(self.parts)
        )
