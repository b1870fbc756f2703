"""Bounded dictionary."""

from hypothesis import given
from hypothesis import strategies as st

from ec_store.bounded import BoundedDict

LIMIT = 3
WRITES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=20)


def _latest(writes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the last write of each key, in the order of writing, at most `LIMIT` of them."""
    last = {key: at for at, (key, _) in enumerate(writes)}
    return [write for at, write in enumerate(writes) if last[write[0]] == at][-LIMIT:]


@given(WRITES)
def test_a_bounded_dict_keeps_the_latest_writes(writes: list[tuple[int, int]]) -> None:
    assigned: BoundedDict[int, int] = BoundedDict(LIMIT)
    updated: BoundedDict[int, int] = BoundedDict(LIMIT)
    for key, value in writes:
        assigned[key] = value
    updated.update(writes)

    assert list(assigned.items()) == list(updated.items()) == _latest(writes)


def test_setdefault_of_a_bounded_dict_evicts() -> None:
    bounded: BoundedDict[int, int] = BoundedDict(1)

    assert (bounded.setdefault(1, 1), bounded.setdefault(2, 2)) == (1, 2)
    assert bounded == {2: 2}


def test_a_read_of_a_bounded_dict_does_not_count_as_a_use() -> None:
    bounded: BoundedDict[int, int] = BoundedDict(2)
    bounded.update({1: 1, 2: 2})

    assert bounded[1] == bounded.get(1) == 1
    bounded[3] = 3

    assert list(bounded) == [2, 3]
