"""Cases in which each value of each factor meets each value of every other: all of them in pairs.

Most faults of a system with many settings show when two of them meet (Kuhn, Wallace, Gallo,
Software Fault Interactions and Implications for Software Testing, 2004).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

Case = dict[str, Any]
Values = Mapping[str, Sequence[Any]]
Possible = Callable[[Case], bool]
Pair = frozenset[tuple[str, Any]]


def in_pairs(factors: Values, possible: Possible = lambda _: True) -> list[Case]:
    """Few cases, and all pairs in them that can be.

    Args:
        factors: the values of each.
        possible: whether a part of a case is as it may be. Of what a part does not have, it says
            nothing: whatever it refuses, it refuses however much is added.
    """
    wanted = {
        frozenset({(one, a), (other, b)}): None  # a set that keeps its order
        for one, other in combinations(factors, 2)
        for a in factors[one]
        for b in factors[other]
    }
    cases = []
    while wanted:
        seed = next(iter(wanted))
        case = _completed(dict(sorted(seed, key=str)), factors, possible, wanted)
        if case is None:
            del wanted[seed]
            continue
        cases.append(case)
        for pair in pairs_of(case):
            wanted.pop(pair, None)
    return cases


def pairs_of(case: Case) -> Iterable[Pair]:
    """All pairs of values that meet in a case."""
    return map(frozenset, combinations(case.items(), 2))


def _completed(
    case: Case, factors: Values, possible: Possible, wanted: Mapping[Pair, None]
) -> Case | None:
    """Return a whole case with this part and with many wanted pairs; None if there is none."""
    if not possible(case):
        return None
    for name in factors.keys() - case.keys():  # what leads nowhere is better seen at once
        if not any(possible({**case, name: value}) for value in factors[name]):
            return None
    missing = next((name for name in factors if name not in case), None)
    if missing is None:
        return {name: case[name] for name in factors}

    def gain(value: Any) -> tuple[int, int]:
        """How many pairs are wanted no more with this value, and how many there are yet."""
        own = (missing, value)
        now = sum(frozenset({own, there}) in wanted for there in case.items())
        return now, sum(own in pair for pair in wanted)

    for value in sorted(factors[missing], key=gain, reverse=True):
        found = _completed({**case, missing: value}, factors, possible, wanted)
        if found is not None:
            return found
    return None
