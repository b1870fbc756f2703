from hypothesis import given
from hypothesis import strategies as st

from ec_store.eviction import HIGH_WATER, LOW_WATER, Kept, excess_bytes, victims

KEPT = st.lists(
    st.builds(Kept, st.text("abcdef", min_size=3), st.integers(1, 100), st.floats(0, 1000)),
    unique_by=lambda kept: kept.digest,
)


def gone(kept: list[Kept], leased: set[str] = frozenset(), excess: int = 0) -> list[str]:  # type: ignore[assignment]
    going = victims(kept, now_s=1000, ttl_s=100, leased=leased, excess=excess)
    return [entry.digest for entry in going]


def test_the_least_recently_used_go_until_enough_is_free() -> None:
    kept = [Kept("new", 10, 999), Kept("old", 10, 950), Kept("older", 10, 920)]

    assert gone(kept) == []
    assert gone(kept, excess=1) == ["older"]
    assert gone(kept, excess=11) == ["older", "old"]
    assert gone(kept, excess=1000) == ["older", "old", "new"]


def test_what_expired_goes_even_if_there_is_room() -> None:
    assert gone([Kept("kept", 10, 900), Kept("expired", 10, 899)]) == ["expired"]


def test_what_is_leased_stays_expired_or_not() -> None:
    kept = [Kept("a", 10, 0), Kept("b", 10, 950), Kept("c", 10, 960)]

    assert gone(kept, leased={"a", "b"}, excess=5) == ["c"]


def test_nothing_is_in_excess_below_the_high_water_mark() -> None:
    assert excess_bytes(int(1000 * HIGH_WATER), 1000) == 0
    assert excess_bytes(1001, 1000) == 1001 - 1000 * LOW_WATER


@given(KEPT, st.sets(st.text("abcdef", min_size=3)), st.integers(0, 3000))
def test_enough_goes_and_no_more_and_never_a_newer_before_an_older(
    kept: list[Kept], leased: set[str], excess: int
) -> None:
    going = victims(kept, now_s=1000, ttl_s=2000, leased=leased, excess=excess)
    stays = [entry for entry in kept if entry not in going and entry.digest not in leased]
    freed = sum(entry.size_bytes for entry in going)

    assert not {entry.digest for entry in going} & leased
    assert freed >= excess or not stays
    assert not going or freed - going[-1].size_bytes < excess
    assert all(old.used_s <= new.used_s for old in going for new in stays)
