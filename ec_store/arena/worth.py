"""Worth of entries: which of them to evict, so that hits save the most encode seconds. Pure.

The worth of an entry is its encode seconds for each byte, times its uses. A use counts half as much
after `HALF_LIFE` turnovers of the memory, so an old favourite goes. Seconds for each byte come from
GreedyDual-Size (Cao, Irani 1997), uses from GreedyDual-Size-Frequency (Cherkasova 1998). Both age
entries by what was evicted last; the decay of LRFU (Lee et al. 2001) saves more, and at all times
the same order holds: the logarithm of the worth, plus the time of the last use in half-lives. Time
is what was written, in turnovers.

Where conversations move on, entries are used often and then never again, and least use is better.
`OrderTrial` finds out which order is.
"""

import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass

HALF_LIFE = 4.0
"""Turnovers of the memory after which a use counts half."""

YOUNG_SHARE = 0.1
"""Share of the memory for the entries that were written last. They have no worth yet: otherwise the
next write would evict an entry before its first reader has it. As in S3-FIFO (Yang et al. 2023)."""

STEPS = 8
"""Steps in which twice the worth is divided. Entries of one step go in the order of their use."""

FARTHEST = 6.0
"""Largest distance of an entry's seconds for each byte from their mean, as a power of two: a wrong
measurement of minutes would keep its entry for thousands of turnovers."""

SAMPLED = 4
"""One key in this many takes part in the trial of both orders."""

MARGIN = 0.1
"""Share by which the seconds that one order alone has saved must exceed those of the other."""

TRIAL_TURNOVERS = 2.0
"""Turnovers of the memory after which saved seconds count half in the trial."""


class EncodeRate:
    """Mean of the encode seconds for each byte, over all measured entries."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._bytes = 0

    def compare(self, size_bytes: int, encode_s: float) -> float:
        """Return an entry's seconds for each byte over their mean, as a power of two.

        0 for an entry without a measurement (`encode_s` 0): it is estimated from its size.
        """
        if encode_s <= 0:
            return 0.0
        self._seconds += encode_s
        self._bytes += size_bytes
        ratio = encode_s / size_bytes * (self._bytes / self._seconds)
        return min(FARTHEST, max(-FARTHEST, math.log2(ratio)))


@dataclass(slots=True, eq=False)
class Ranked:
    """Entry in the order of worth.

    Attributes:
        rate: its encode seconds for each byte, as of `EncodeRate.compare`.
        uses: its uses at the last one, those before it decayed.
        used_at: time of its last use in half-lives.
        step: step of worth that it is in; None if it is young, or set aside.
    """

    digest: bytes
    size_bytes: int
    rate: float
    uses: float
    used_at: float
    step: int | None = None


class WorthOrder:
    """Order of entries by their worth, the least first. The cost of a call is constant.

    It keeps the uses of as many evicted entries as it has entries: if one of them is written again,
    they count.
    """

    def __init__(self, size_bytes: int) -> None:
        """Create an empty order for a memory of this size."""
        self._half_life_bytes = size_bytes * HALF_LIFE
        self._young_bytes = size_bytes * YOUNG_SHARE
        self._entries = 0
        self._now = 0.0
        self._young: OrderedDict[Ranked, None] = OrderedDict()
        self._steps: dict[int, dict[Ranked, None]] = {}
        self._numbers: list[int] = []
        """Heap of the numbers of the steps, also of those that are empty."""
        self._evicted: OrderedDict[bytes, tuple[float, float]] = OrderedDict()
        """Uses of evicted entries and time of the last one, by digest."""

    def enter(self, digest: bytes, size_bytes: int, rate: float) -> Ranked:
        """Add an entry that was written, which is a use of it."""
        self._now += size_bytes / self._half_life_bytes
        uses, used_at = self._evicted.pop(digest, (0.0, self._now))
        uses = 1 + uses * 2 ** (used_at - self._now)
        entry = Ranked(digest, size_bytes, rate, uses, self._now)
        self._entries += 1
        self._young[entry] = None
        self._young_bytes -= size_bytes
        while self._young_bytes < 0:
            self._rank(self._pop_young())
        return entry

    def use(self, entry: Ranked) -> None:
        """Count a use of an entry."""
        entry.uses = 1 + entry.uses * 2 ** (entry.used_at - self._now)
        entry.used_at = self._now
        if entry.step is not None and entry.step != _step_of(entry):
            del self._steps[entry.step][entry]
            self._rank(entry)

    def pop(self) -> Ranked | None:
        """Return the entry of the least worth, and set it aside; None if none is left.

        `leave` or `put_back` follows.
        """
        while self._numbers:
            step = self._steps[self._numbers[0]]
            if step:
                entry = next(iter(step))
                del step[entry]
                entry.step = None
                return entry
            del self._steps[heapq.heappop(self._numbers)]
        return self._pop_young() if self._young else None

    def put_back(self, entry: Ranked) -> None:
        """Put an entry back that `pop` has set aside; others stay where they are."""
        if entry.step is None and entry not in self._young:
            self._rank(entry)

    def leave(self, entry: Ranked, *, evicted: bool) -> None:
        """Remove an entry; the uses of an evicted one are kept."""
        self._entries -= 1
        if entry.step is not None:
            del self._steps[entry.step][entry]
            entry.step = None
        elif entry in self._young:
            del self._young[entry]
            self._young_bytes += entry.size_bytes
        if evicted:
            self._evicted[entry.digest] = (entry.uses, entry.used_at)
        while len(self._evicted) > self._entries:
            self._evicted.popitem(last=False)

    def _pop_young(self) -> Ranked:
        entry, _ = self._young.popitem(last=False)
        self._young_bytes += entry.size_bytes
        return entry

    def _rank(self, entry: Ranked) -> None:
        number = entry.step = _step_of(entry)
        if number not in self._steps:
            while self._numbers and not self._steps[self._numbers[0]]:
                del self._steps[heapq.heappop(self._numbers)]
            self._steps[number] = {}
            heapq.heappush(self._numbers, number)
        self._steps[number][entry] = None


def _step_of(entry: Ranked) -> int:
    return math.floor(STEPS * (entry.rate + math.log2(entry.uses) + entry.used_at))


class OrderTrial:
    """Trial of both orders, least use and worth, on a sample of the keys.

    Each has a memory without bytes, smaller by the share of the sample, as in the miniature
    simulations of Waldspurger et al. (2017).

    Attributes:
        by_worth: whether worth has saved more encode seconds lately.
    """

    def __init__(self, size_bytes: int, least_bytes: int = 0) -> None:
        """Create the trial for a memory of this size.

        Smaller entries count as `least_bytes`: the number of entries has a bound too.
        """
        self.by_worth = True
        self._least_bytes = least_bytes
        self._size_bytes = size_bytes // SAMPLED
        self._least_use = _LeastUse(self._size_bytes)
        self._worth = _Worth(self._size_bytes)
        self._by_worth_s = self._by_least_use_s = 0.0

    def refer(self, digest: bytes, size_bytes: int, rate: float) -> None:
        """Count a use of an entry, or its write: both orders see the same."""
        if digest[-1] % SAMPLED or size_bytes > self._size_bytes:
            return
        kept_bytes = max(size_bytes, self._least_bytes)
        by_worth = self._worth.refer(digest, kept_bytes, rate)
        by_least_use = self._least_use.refer(digest, kept_bytes)
        if not by_least_use:
            decay = 2 ** -(kept_bytes / self._size_bytes / TRIAL_TURNOVERS)
            self._by_worth_s *= decay
            self._by_least_use_s *= decay
        if by_worth is by_least_use:
            return
        self._by_worth_s += by_worth * size_bytes * 2**rate
        self._by_least_use_s += by_least_use * size_bytes * 2**rate
        difference_s = self._by_worth_s - self._by_least_use_s
        if abs(difference_s) > MARGIN * max(self._by_worth_s, self._by_least_use_s):
            self.by_worth = difference_s > 0


class _LeastUse:
    """Entries that least use would keep."""

    def __init__(self, size_bytes: int) -> None:
        self._free_bytes = size_bytes
        self._sizes: OrderedDict[bytes, int] = OrderedDict()

    def refer(self, digest: bytes, size_bytes: int) -> bool:
        """Return whether the entry is kept; write it otherwise."""
        if digest in self._sizes:
            self._sizes.move_to_end(digest)
            return True
        while self._free_bytes < size_bytes:
            self._free_bytes += self._sizes.popitem(last=False)[1]
        self._sizes[digest] = size_bytes
        self._free_bytes -= size_bytes
        return False


class _Worth:
    """Entries that worth would keep."""

    def __init__(self, size_bytes: int) -> None:
        self._free_bytes = size_bytes
        self._order = WorthOrder(size_bytes)
        self._entries: dict[bytes, Ranked] = {}

    def refer(self, digest: bytes, size_bytes: int, rate: float) -> bool:
        """Return whether the entry is kept; write it otherwise."""
        if entry := self._entries.get(digest):
            self._order.use(entry)
            return True
        while self._free_bytes < size_bytes and (entry := self._order.pop()):
            self._free_bytes += entry.size_bytes
            self._order.leave(entry, evicted=True)
            del self._entries[entry.digest]
        self._entries[digest] = self._order.enter(digest, size_bytes, rate)
        self._free_bytes -= size_bytes
        return False
