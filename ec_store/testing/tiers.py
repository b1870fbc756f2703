"""Contract of a tier behind a host's memory. A tier's tests subclass it and define two fixtures.

    opened  -> Callable[[], Tier]: returns a new handle on the test's only tier at each call. The
        tier is empty when the test begins; the fixture closes the handles.
    spoil   -> Callable[[EntryKey], None]: changes a byte of the payload stored under a key

`SharedTierContract` is that of claims in a tier that several hosts share.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from ec_store import EntryInfo, EntryKey
from ec_store.arena.tier import SharedTier, Tier
from ec_store.entry import checksum
from ec_store.testing.stores import (
    MALFORMED,
    EntriesContract,
    another_release,
    assert_same,
    key,
    malformed,
    sized,
)

OpenedTier = Callable[[], Tier]
OpenedSharedTier = Callable[[], SharedTier]

SHORT_S = 0.2
LONG_S = 60.0


class TierContract(EntriesContract[Tier]):
    refuses_long_keys = True

    def find(self, handle: Tier, keys: Sequence[EntryKey]) -> Sequence[EntryInfo | None]:
        return handle.find([each.digest for each in keys])

    def remove(self, handle: Tier, keys: Sequence[EntryKey]) -> int:
        return handle.remove([each.digest for each in keys])

    def test_a_lookup_has_the_checksum_of_an_entry(self, handle: Tier) -> None:
        handle.put(key(), sized(10))

        [info] = handle.find([key().digest])
        assert info is not None
        assert info.checksum == checksum(sized(10).data)

    def test_a_lookup_of_many_keys(self, handle: Tier) -> None:
        keys = [key(str(number)) for number in range(300)]
        for each in keys[::100]:
            handle.put(each, sized(10))

        found = handle.find([each.digest for each in keys])
        assert [number for number, info in enumerate(found) if info] == [0, 100, 200]

    @pytest.mark.parametrize("kind", MALFORMED)
    def test_an_entry_with_a_value_of_the_wrong_type_is_a_miss(
        self, handle: Tier, kind: str
    ) -> None:
        handle.put(key(), malformed(kind))

        assert handle.get(key()) is None
        assert handle.find([key().digest]) == [None]
        assert handle.put(key(), sized(100)) is True
        assert_same(sized(100), handle.get(key()))

    def test_an_entry_of_another_format_is_a_miss(self, opened: OpenedTier) -> None:
        with another_release():
            opened().put(key(), sized(100))
        handle = opened()

        assert handle.get(key()) is None
        assert handle.find([key().digest]) == [None]
        assert handle.put(key(), sized(100, 2)) is True
        assert_same(sized(100, 2), handle.get(key()))

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
