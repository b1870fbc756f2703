"""Eviction: how much it frees, and which entries."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_store.disk.eviction_policy import (
    BATCH,
    SAMPLED,
    EvictionCandidate,
    FileSystem,
    choose_victims,
    excess_bytes,
    sample_size,
    taken_bytes,
)

GIB = 2**30
KEPT = st.lists(
    st.builds(
        EvictionCandidate,
        st.uuids().map(lambda one: one.hex),
        st.integers(0, 10**6),
        st.floats(0, 1000),
    ),
    max_size=60,
    unique_by=lambda one: one.digest,
)


@pytest.mark.parametrize(
    ("size", "taken"), [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192), (2**40 + 1, 2**40 + 4096)]
)
def test_entry_takes_whole_blocks(size: int, taken: int) -> None:
    assert taken_bytes(size) == taken


def test_quota_is_the_smaller_of_the_setting_and_a_share() -> None:
    disk = FileSystem(100 * GIB, 50 * GIB)

    assert disk.quota_bytes(64 * GIB, 0.5) == 50 * GIB
    assert disk.quota_bytes(50 * GIB, 0.5) == 50 * GIB
    assert disk.quota_bytes(49 * GIB, 0.5) == 49 * GIB


def test_reserve_is_a_twentieth_and_a_gibibyte_at_most() -> None:
    assert FileSystem(20 * GIB - 20, 0).reserve_bytes == GIB - 1
    assert FileSystem(20 * GIB, 0).reserve_bytes == GIB
    assert FileSystem(2000 * GIB, 0).reserve_bytes == GIB


def test_reserve_is_kept_after_the_next_entry_too() -> None:
    assert FileSystem(100 * GIB, GIB + 4096).lacking_bytes(4096) == 0
    assert FileSystem(100 * GIB, GIB + 4095).lacking_bytes(4096) == 1
    assert FileSystem(100 * GIB, 0).lacking_bytes(4096) == GIB + 4096


def test_reserve_of_files_is_a_twentieth_and_256_at_most() -> None:
    assert FileSystem(GIB, GIB, 1000, 50).lacking_files == 0
    assert FileSystem(GIB, GIB, 1000, 49).lacking_files == 1
    assert FileSystem(GIB, GIB, 10**6, 0).lacking_files == 256
    assert FileSystem(GIB, GIB).lacking_files == 0


def test_a_file_system_without_a_size_sets_no_quota() -> None:
    assert FileSystem(0, 0).quota_bytes(64 * GIB, 0.5) == 64 * GIB
    assert FileSystem(0, 0).lacking_bytes(GIB) == 0


def test_eviction_ahead_of_writers_begins_at_the_high_water_mark() -> None:
    assert excess_bytes(95, 100) == 0
    assert excess_bytes(96, 100) == 1


@given(excess=st.integers(-(2**40), 2**40), mean=st.floats(0, 2**33))
def test_sample_is_bounded(excess: int, mean: float) -> None:
    assert SAMPLED <= sample_size(excess, mean) <= SAMPLED * BATCH


def test_eviction_sample_grows_with_the_bytes_to_free() -> None:
    assert [sample_size(n * 2**20, 2**20) for n in (0, 1, 2, 3, 16, 17)] == [
        SAMPLED * n for n in (1, 1, 2, 3, 16, 16)
    ]


@given(sample=KEPT, all_seen=st.booleans(), ttl_s=st.floats(1, 2000), excess=st.integers(0, 10**7))
def test_victims_are_the_expired_and_then_the_least_recently_used(
    sample: list[EvictionCandidate], all_seen: bool, ttl_s: float, excess: int
) -> None:
    going = choose_victims(sample, all_seen=all_seen, now_s=1000, ttl_s=ttl_s, excess=excess)
    expired = {one.digest for one in sample if 1000 - one.used_s > ttl_s}
    stay = [one for one in sample if one not in going]

    assert {one.digest for one in going[: len(expired)]} == expired
    assert all(one.used_s <= other.used_s for one, other in pairwise(going))
    assert not going or not stay or going[-1].used_s <= min(one.used_s for one in stay)
    sizes = [taken_bytes(one.size_bytes) for one in going]
    assert len(going) <= len(expired) or sum(sizes[:-1]) < excess
    if all_seen:
        assert sum(sizes) >= excess or not stay or len(going) >= BATCH
        assert len(going) <= max(len(expired), BATCH)
    else:
        assert len(going) <= max(len(expired), -(-len(sample) // SAMPLED))


def test_victims_of_samples_are_old() -> None:
    """The mean rank of the victims is in the oldest eighth; with exact LRU it would be 0."""
    chance = random.Random(7)  # noqa: S311
    store = [EvictionCandidate(str(n), 9 * 2**20, float(n)) for n in range(10_000)]
    ranks = []
    for _ in range(200):
        sample = chance.sample(store, sample_size(2**20, 9 * 2**20))
        ranks += [
            one.used_s
            for one in choose_victims(sample, all_seen=False, now_s=10_000, ttl_s=1e9, excess=2**20)
        ]

    assert len(ranks) == 200
    assert sum(ranks) / len(ranks) < 10_000 / 8
    assert sum(rank > 5000 for rank in ranks) <= 5
