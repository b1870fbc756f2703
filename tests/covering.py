"""Pairwise test cases: each value of a factor occurs with each value of every other factor.

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
    """Return a small set of cases that covers all allowed pairs of values.

    Args:
        factors: the values of each factor.
        possible: whether a partial case is allowed. A partial case that is rejected must stay
            rejected whatever values are added to it.
    """
    wanted = {
        frozenset({(one, a), (other, b)}): None  # dict instead of set: keeps the order
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
    """Return all pairs of values in a case."""
    return map(frozenset, combinations(case.items(), 2))


def _completed(
    case: Case, factors: Values, possible: Possible, wanted: Mapping[Pair, None]
) -> Case | None:
    """Return a complete case with this part and many wanted pairs, or None if there is none."""
    if not possible(case):
        return None
    for name in factors.keys() - case.keys():  # detect dead ends early
        if not any(possible({**case, name: value}) for value in factors[name]):
            return None
    missing = next((name for name in factors if name not in case), None)
    if missing is None:
        return {name: case[name] for name in factors}

    def gain(value: Any) -> tuple[int, int]:
        """Return how many wanted pairs the value covers now, and how many have the value."""
        own = (missing, value)
        now = sum(frozenset({own, there}) in wanted for there in case.items())
        return now, sum(own in pair for pair in wanted)

    for value in sorted(factors[missing], key=gain, reverse=True):
        found = _completed({**case, missing: value}, factors, possible, wanted)
        if found is not None:
            return found
    return None
