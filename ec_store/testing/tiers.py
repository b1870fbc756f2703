"""Contract of a tier behind a host's memory. A tier's tests subclass it and define two fixtures.

    opened  -> Callable[[], Tier]: returns a new handle on the test's only tier at each call. The
        tier is empty when the test begins; the fixture closes the handles.
    spoil   -> Callable[[EntryKey], None]: changes a byte of the payload stored under a key

`SharedTierContract` is that of claims in a tier that several hosts share.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given

from ec_store import Entry, EntryKey
from ec_store.arena.tier import SharedTier, Tier
from ec_store.entry import ITEM_BYTES, checksum, payload_bytes
from ec_store.errors import EntryTooLarge
from ec_store.testing.stores import (
    ANY_TEXT,
    AWKWARD,
    MALFORMED,
    Spoil,
    another_release,
    assert_same,
    entries,
    entry,
    key,
    malformed,
    relaxed,
    sized,
)

OpenedTier = Callable[[], Tier]
OpenedSharedTier = Callable[[], SharedTier]

SHORT_S = 0.2
LONG_S = 60.0


class TierContract:
    @pytest.fixture
    def tier(self, opened: OpenedTier) -> Tier:
        return opened()

    def test_an_entry_is_read_through_every_handle(self, opened: OpenedTier) -> None:
        kept = entry(metadata={"image_grid_thw": [1, 36, 54]})

        assert opened().put(key(), kept) is True
        assert_same(kept, opened().get(key()))

    def test_a_missing_entry_is_a_miss(self, tier: Tier) -> None:
        assert tier.get(key()) is None
        assert tier.find([key().digest]) == [None]
        assert tier.remove([key().digest]) == 0
        assert tier.purge("model") == 0

    def test_calls_without_keys_return_empty_results(self, tier: Tier) -> None:
        assert tier.find([]) == []
        assert tier.remove([]) == 0

    def test_the_second_put_of_a_key_keeps_the_first_entry(self, opened: OpenedTier) -> None:
        first, second = opened(), opened()

        assert first.put(key(), sized(100, 1)) is True
        assert second.put(key(), sized(100, 2)) is False
        assert_same(sized(100, 1), second.get(key()))

    @pytest.mark.parametrize("identifier", AWKWARD)
    def test_an_awkward_identifier_is_a_key_like_any_other(
        self, tier: Tier, identifier: str
    ) -> None:
        left, other = key(identifier), key(identifier + "x")
        if refused(tier, left):
            return
        tier.put(other, sized(10, 2))

        assert_same(sized(10, 1), tier.get(left))
        assert_same(sized(10, 2), tier.get(other))
        found = tier.find([left.digest, other.digest])
        assert [info and info.key for info in found] == [left, other]

    @relaxed
    @given(namespace=ANY_TEXT, identifier=ANY_TEXT, kept=entries())
    def test_any_key_keeps_any_entry(
        self, tier: Tier, namespace: str, identifier: str, kept: Entry
    ) -> None:
        any_key = EntryKey(namespace, identifier)
        tier.remove([any_key.digest])

        assert tier.put(any_key, kept) is True
        assert_same(kept, tier.get(any_key))
        assert tier.remove([any_key.digest]) == 1
        assert tier.find([any_key.digest]) == [None]

    @pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
    @pytest.mark.parametrize("shape", [(0,), (0, 1024), (1,), (3, 5), (2, 3, 4), ()])
    def test_every_dtype_and_shape(self, tier: Tier, dtype: str, shape: tuple[int, ...]) -> None:
        payload = bytes(range(payload_bytes(dtype, shape)))
        kept = Entry(memoryview(payload), dtype, shape, "audio")
        tier.put(key(), kept)

        assert_same(kept, tier.get(key()))

    @pytest.mark.parametrize("length", [2**12, 2**16 - 2, 2**20 + 2, 5 * 2**20])
    def test_a_large_entry(self, tier: Tier, length: int) -> None:
        tier.put(key(), sized(length, 7))

        assert_same(sized(length, 7), tier.get(key()))

    def test_an_entry_that_was_returned_outlives_everything(self, opened: OpenedTier) -> None:
        tier = opened()
        tier.put(key(), sized(2**20, 1))
        found = tier.get(key())
        tier.remove([key().digest])
        tier.put(key(), sized(2**20, 2))
        for _ in range(20):
            tier.get(key())
        tier.close()

        assert_same(sized(2**20, 1), found)
        assert found is not None
        assert found.data.readonly

    def test_a_lookup_describes_the_entries_in_the_order_of_the_keys(self, tier: Tier) -> None:
        kept = entry(b"abcdefgh", "F32", modality="video", metadata={"n": [2]})
        tier.put(key("b"), kept)
        tier.put(key("a"), entry())
        found = tier.find([key(name).digest for name in ("a", "none", "b", "a")])

        assert [info and info.key.identifier for info in found] == ["a", None, "b", "a"]
        info = found[2]
        assert info is not None
        assert (info.dtype, info.shape, info.modality) == ("F32", (2,), "video")
        assert (info.metadata, info.checksum) == ({"n": [2]}, checksum(kept.data))

    def test_a_lookup_of_many_keys(self, tier: Tier) -> None:
        keys = [key(str(number)) for number in range(300)]
        for each in keys[::100]:
            tier.put(each, sized(10))

        found = tier.find([each.digest for each in keys])
        assert [number for number, info in enumerate(found) if info] == [0, 100, 200]

    def test_remove_returns_the_number_of_deleted_entries(self, tier: Tier) -> None:
        for name in "abc":
            tier.put(key(name), entry())
        names = [key(name).digest for name in ("a", "none", "b", "a")]

        assert tier.remove(names) == 2
        assert tier.remove(names) == 0
        found = tier.find([key(name).digest for name in "abc"])
        assert [info is not None for info in found] == [False, False, True]

    def test_a_deleted_entry_can_be_put_again(self, tier: Tier) -> None:
        tier.put(key(), sized(10, 1))
        tier.find([key().digest])
        tier.remove([key().digest])

        assert tier.put(key(), sized(10, 2)) is True
        assert_same(sized(10, 2), tier.get(key()))

    def test_namespaces_share_nothing(self, tier: Tier) -> None:
        tier.put(key(namespace="a"), sized(10, 1))

        assert tier.get(key(namespace="b")) is None
        assert tier.find([key(namespace="b").digest]) == [None]
        assert tier.put(key(namespace="b"), sized(10, 2)) is True
        assert_same(sized(10, 1), tier.get(key(namespace="a")))

    def test_purge_forgets_one_namespace(self, tier: Tier) -> None:
        for name in "abc":
            tier.put(key(name, "old"), entry())
        tier.put(key("a", "new"), entry())

        assert tier.purge("old") == 3
        assert tier.purge("old") == 0
        assert tier.find([key(name, "old").digest for name in "abc"]) == [None] * 3
        assert tier.get(key("a", "new")) is not None
        assert tier.put(key("a", "old"), sized(10, 2)) is True
        assert_same(sized(10, 2), tier.get(key("a", "old")))

    def test_a_spoiled_entry_is_a_miss_and_can_be_put_again(
        self, opened: OpenedTier, spoil: Spoil
    ) -> None:
        opened().put(key(), sized(100, 1))
        spoil(key())
        tier = opened()
        before = tier.counts["corrupt"]

        assert tier.get(key()) is None
        assert tier.counts["corrupt"] == before + 1
        assert tier.find([key().digest]) == [None]
        assert tier.put(key(), sized(100, 2)) is True
        assert_same(sized(100, 2), tier.get(key()))

    @pytest.mark.parametrize("kind", MALFORMED)
    def test_an_entry_with_a_value_of_the_wrong_type_is_a_miss(self, tier: Tier, kind: str) -> None:
        tier.put(key(), malformed(kind))

        assert tier.get(key()) is None
        assert tier.find([key().digest]) == [None]
        assert tier.put(key(), sized(100)) is True
        assert_same(sized(100), tier.get(key()))

    def test_an_entry_of_another_format_is_a_miss(self, opened: OpenedTier) -> None:
        with another_release():
            opened().put(key(), sized(100))
        tier = opened()

        assert tier.get(key()) is None
        assert tier.find([key().digest]) == [None]
        assert tier.put(key(), sized(100, 2)) is True
        assert_same(sized(100, 2), tier.get(key()))

    def test_many_threads_on_one_handle(self, tier: Tier) -> None:
        keys = [key(str(n)) for n in range(8)]
        started = threading.Barrier(8)

        def work(worker: int) -> int:
            started.wait()
            wrong = 0
            for turn in range(60):
                n = (worker + turn) % len(keys)
                if turn % 3 == 0:
                    tier.put(keys[n], sized(20_000, n))
                elif turn % 11 == 0:
                    tier.remove([keys[n].digest])
                found = tier.get(keys[n])
                wrong += found is not None and bytes(found.data) != bytes(sized(20_000, n).data)
                del found
                tier.find([each.digest for each in keys])
            return wrong

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(work, range(8))) == [0] * 8

    def test_of_several_writers_of_a_key_the_entry_of_one_is_kept(self, opened: OpenedTier) -> None:
        tiers = [opened() for _ in range(4)]
        started = threading.Barrier(4)

        def write(n: int) -> bool:
            started.wait()
            return tiers[n].put(key(), sized(100_000, n))

        with ThreadPoolExecutor(4) as pool:
            written = list(pool.map(write, range(4)))
        found = tiers[0].get(key())

        assert found is not None
        assert bytes(found.data) in [bytes(sized(100_000, n).data) for n in range(4)]
        assert True in written

    def test_a_tier_can_be_closed_twice(self, opened: OpenedTier) -> None:
        tier = opened()
        tier.put(key(), sized(10))
        tier.close()
        tier.close()

        assert opened().get(key()) is not None


class SharedTierContract:
    """Contract of claims in a tier. `opened` returns tiers with claims."""

    def test_a_claim_is_that_of_one_owner(self, opened: OpenedSharedTier) -> None:
        left, other = opened(), opened()

        assert left.claim_missing([key().digest], b"one", LONG_S) == [True]
        assert other.claim_missing([key().digest], b"other", LONG_S) == [False]
        assert left.claim_missing([key().digest], b"one", LONG_S) == [True]

    def test_a_released_claim_is_free(self, opened: OpenedSharedTier) -> None:
        left, other = opened(), opened()
        left.claim_missing([key().digest], b"one", LONG_S)

        other.release_claims([key().digest], b"other")
        assert other.claim_missing([key().digest], b"other", LONG_S) == [False]
        left.release_claims([key().digest], b"one")
        assert other.claim_missing([key().digest], b"other", LONG_S) == [True]

    def test_a_claim_ends(self, opened: OpenedSharedTier) -> None:
        left, other = opened(), opened()
        left.claim_missing([key().digest], b"one", SHORT_S)
        time.sleep(2 * SHORT_S)

        assert other.claim_missing([key().digest], b"other", LONG_S) == [True]

    def test_an_existing_entry_is_found_and_its_claim_released(
        self, opened: OpenedSharedTier
    ) -> None:
        left, other = opened(), opened()
        left.claim_missing([key().digest], b"one", LONG_S)
        left.put(key(), sized(10))
        [found] = left.claim_missing([key().digest], b"one", LONG_S)
        left.remove([key().digest])

        assert not isinstance(found, bool)
        assert found.key == key()
        assert other.claim_missing([key().digest], b"other", LONG_S) == [True]


def refused(tier: Tier, left: EntryKey) -> bool:
    """Write an entry; return whether its header is too large for the tier."""
    try:
        tier.put(left, sized(10, 1))
    except EntryTooLarge:
        return True
    return False
