"""Assignment of a request's items to instances by predicted cost. Pure.

A request waits for the last of its items, so its instances should finish together. The rule is
"longest processing time first" (R. L. Graham, Bounds on Multiprocessing Timing Anomalies, 1969): on
idle equal instances the last one finishes at most 1/3 later than in the best assignment.
"""

from collections.abc import Sequence


def spread_costs(
    costs: Sequence[float], busy: Sequence[float], shares: Sequence[float]
) -> list[int]:
    """Return the index of an instance for each item: the costliest first, each where it ends first.

    Of equal instances the first one is taken, and of equal items the first one is assigned first.

    Args:
        costs: predicted cost of each item.
        busy: cost of the work that each instance has already, in the same unit.
        shares: speed of each instance, relative to the others.
    """
    ends = [work / share for work, share in zip(busy, shares, strict=True)]
    assigned = [0] * len(costs)
    for index in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        after = [end + costs[index] / share for end, share in zip(ends, shares, strict=True)]
        assigned[index] = earliest = after.index(min(after))
        ends[earliest] = after[earliest]
    return assigned
