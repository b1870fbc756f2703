"""Contract of a store. A backend's tests subclass `StoreContract` and define two fixtures.

    opened  -> Callable[[], Store]: returns a new handle on the test's only store at each call. The
        store is empty when the test begins; the fixture closes the handles.
    spoil   -> Callable[[EntryKey], None]: changes a byte of the payload stored under a key

If namespaces, counts or bytes of a backend become visible late, `opened` must wait for them.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ec_store.entry
from ec_store import Entry, EntryInfo, EntryKey, EntryTooLarge, Store
from ec_store.counts import Counts
from ec_store.entry import ITEM_BYTES, checksum, payload_bytes

Opened = Callable[[], Store]
Spoil = Callable[[EntryKey], None]

ANY_TEXT = st.text(
    st.characters(min_codepoint=0, max_codepoint=0x10FFFF, exclude_categories=()), max_size=400
)
AWKWARD = [
    "",
    ".",
    "..",
    "../x",
    "/etc/passwd",
    "a/b",
    "nul\0nul",
    "line\nbreak\r\n",
    "x" * 300,
    "x" * 5000,
    "\ud800",
    "{tag}",
    "*",
    "%2e%2e",
    "ключ 🎞",
]
JSON = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=10),
    st.lists(st.integers(-(2**31), 2**31), max_size=4) | st.text(st.characters(codec="utf-8")),
    max_size=3,
)
MALFORMED: dict[str, tuple[int, dict[str, Any]]] = {
    "sizes that are floats": (24, {"shape": (3.0, 4.0)}),
    "sizes that are floats, large": (4 * 2**20, {"shape": (2.0**20, 2)}),
    "a size that is a boolean": (24, {"shape": (True, 12)}),
    "two negative sizes": (24, {"shape": (-3, -4)}),
    "two negative sizes, large": (4 * 2**20, {"shape": (-(2**20), -2)}),
    "metadata that are a list": (24, {"metadata": [1]}),
    "metadata that are null": (24, {"metadata": None}),
    "a modality that is a number": (24, {"modality": 1}),
    "a modality that is an object": (24, {"modality": {}}),
}
"""Bytes and fields of entries with a consistent header and a value of the wrong type."""


def unchecked(entry: Entry, **fields: Any) -> Entry:
    """Change fields of an entry without a check, as a faulty writer would."""
    for name, value in fields.items():
        object.__setattr__(entry, name, value)
    return entry


def malformed(kind: str) -> Entry:
    length, fields = MALFORMED[kind]
    return unchecked(sized(length), **fields)


# A store on a disk or behind a socket is sometimes slow, and keeps entries of earlier examples.
relaxed = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)


def key(identifier: str = "picture", namespace: str = "model") -> EntryKey:
    return EntryKey(namespace, identifier)


def entry(payload: bytes = b"0123456789abcdef", dtype: str = "BF16", **more: Any) -> Entry:
    shape = (len(payload) // ITEM_BYTES[dtype],)
    return Entry(memoryview(payload), dtype, shape, **{"modality": "image", **more})


def sized(length: int, seed: int = 0) -> Entry:
    """Return an entry with `length` bytes of payload that depend on the seed; `length` is even."""
    return entry((seed.to_bytes(2, "little") * (length // 2 + 1))[:length])


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    size = payload_bytes(dtype, shape)
    payload = draw(st.binary(min_size=size, max_size=size))
    modality = draw(st.sampled_from(["image", "audio", "video"]))
    return Entry(memoryview(payload), dtype, shape, modality, draw(JSON))


def assert_same(expected: Entry, actual: Entry | None) -> None:
    assert actual is not None
    assert bytes(expected.data) == bytes(actual.data)
    assert expected.dtype == actual.dtype
    assert expected.shape == actual.shape
    assert expected.modality == actual.modality
    assert expected.metadata == actual.metadata


@contextmanager
def another_release(format_name: str = "ec_store/2") -> Iterator[None]:
    """Write entries in another format. The headers that are parsed meanwhile are not remembered."""
    with pytest.MonkeyPatch.context() as later:
        later.setattr(ec_store.entry, "FORMAT", format_name)
        later.setattr(ec_store.entry, "_known", ec_store.entry._parsed)  # noqa: SLF001
        yield


class Handle(Protocol):
    """Store or tier, in the part that their contracts share."""

    counts: Counts

    def get(self, key: EntryKey) -> Entry | None: ...
    def put(self, key: EntryKey, entry: Entry) -> bool: ...
    def purge(self, namespace: str) -> int: ...
    def close(self) -> None: ...


H = TypeVar("H", bound=Handle)


class EntriesContract(Generic[H]):
    """Contract of the entries in a store or a tier."""

    refuses_long_keys = False
    """Whether a key may be too long for a header."""

    def find(self, handle: H, keys: Sequence[EntryKey]) -> Sequence[EntryInfo | None]:
        raise NotImplementedError

    def remove(self, handle: H, keys: Sequence[EntryKey]) -> int:
        raise NotImplementedError

    @pytest.fixture
    def handle(self, opened: Callable[[], H]) -> H:
        return opened()

    def test_an_entry_is_read_through_every_handle(self, opened: Callable[[], H]) -> None:
        kept = entry(metadata={"image_grid_thw": [1, 36, 54]})

        assert opened().put(key(), kept) is True
        assert_same(kept, opened().get(key()))

    def test_a_missing_entry_is_a_miss(self, handle: H) -> None:
        assert handle.get(key()) is None
        assert self.find(handle, [key()]) == [None]
        assert self.remove(handle, [key()]) == 0
        assert handle.purge("model") == 0

    def test_calls_without_keys_return_empty_results(self, handle: H) -> None:
        assert self.find(handle, []) == []
        assert self.remove(handle, []) == 0

    def test_the_second_put_of_a_key_keeps_the_first_entry(self, opened: Callable[[], H]) -> None:
        first, second = opened(), opened()

        assert first.put(key(), sized(100, 1)) is True
        assert second.put(key(), sized(100, 2)) is False
        assert_same(sized(100, 1), second.get(key()))

    @pytest.mark.parametrize("identifier", AWKWARD)
    @pytest.mark.security("S14")
    def test_an_awkward_identifier_is_a_key_like_any_other(
        self, handle: H, identifier: str
    ) -> None:
        plain, other = key(identifier), key(identifier + "x")
        try:
            handle.put(plain, sized(10, 1))
        except EntryTooLarge:
            assert self.refuses_long_keys
            return
        handle.put(other, sized(10, 2))

        assert_same(sized(10, 1), handle.get(plain))
        assert_same(sized(10, 2), handle.get(other))
        found = self.find(handle, [plain, other])
        assert [info and info.key for info in found] == [plain, other]

    @relaxed
    @given(namespace=ANY_TEXT, identifier=ANY_TEXT, kept=entries())
    def test_any_key_keeps_any_entry(
        self, handle: H, namespace: str, identifier: str, kept: Entry
    ) -> None:
        any_key = EntryKey(namespace, identifier)
        self.remove(handle, [any_key])

        assert handle.put(any_key, kept) is True
        assert_same(kept, handle.get(any_key))
        assert self.remove(handle, [any_key]) == 1
        assert self.find(handle, [any_key]) == [None]
        assert handle.get(any_key) is None

    @pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
    @pytest.mark.parametrize("shape", [(0,), (0, 1024), (1,), (3, 5), (2, 3, 4), ()])
    def test_every_dtype_and_shape(self, handle: H, dtype: str, shape: tuple[int, ...]) -> None:
        payload = bytes(range(payload_bytes(dtype, shape)))
        kept = Entry(memoryview(payload), dtype, shape, "audio")
        handle.put(key(), kept)

        assert_same(kept, handle.get(key()))

    @pytest.mark.parametrize("length", [2**12, 2**16 - 2, 2**20 + 2, 5 * 2**20])
    def test_a_large_entry(self, handle: H, length: int) -> None:
        handle.put(key(), sized(length, 7))

        assert_same(sized(length, 7), handle.get(key()))

    @pytest.mark.fault(29)
    def test_an_entry_that_was_returned_outlives_everything(self, handle: H) -> None:
        handle.put(key(), sized(2**20, 1))
        found = handle.get(key())
        self.remove(handle, [key()])
        handle.put(key(), sized(2**20, 2))
        for _ in range(20):
            handle.get(key())
        handle.close()

        assert_same(sized(2**20, 1), found)
        assert found is not None
        assert found.data.readonly

    def test_a_lookup_describes_the_entries_in_the_order_of_the_keys(self, handle: H) -> None:
        kept = entry(b"abcdefgh", "F32", modality="video", metadata={"n": [2]})
        handle.put(key("b"), kept)
        handle.put(key("a"), entry())
        found = self.find(handle, [key("a"), key("none"), key("b"), key("a")])

        assert [info and info.key.identifier for info in found] == ["a", None, "b", "a"]
        info = found[2]
        assert info is not None
        assert (info.dtype, info.shape, info.modality) == ("F32", (2,), "video")
        assert (info.metadata, info.payload_bytes) == ({"n": [2]}, 8)
        assert info.checksum in {checksum(kept.data), ""}  # a host's memory keeps it elsewhere

    def test_delete_returns_the_number_of_deleted_entries(self, handle: H) -> None:
        for name in "abc":
            handle.put(key(name), entry())

        assert self.remove(handle, [key("a"), key("none"), key("b"), key("a")]) == 2
        assert self.remove(handle, [key("a")]) == 0
        found = self.find(handle, [key(name) for name in "abc"])
        assert [info is not None for info in found] == [False, False, True]

    def test_a_deleted_entry_can_be_put_again(self, handle: H) -> None:
        handle.put(key(), sized(10, 1))
        self.find(handle, [key()])
        self.remove(handle, [key()])

        assert handle.put(key(), sized(10, 2)) is True
        assert_same(sized(10, 2), handle.get(key()))

    @pytest.mark.security("S17")
    def test_namespaces_share_nothing(self, handle: H) -> None:
        handle.put(key(namespace="a"), sized(10, 1))

        assert handle.get(key(namespace="b")) is None
        assert self.find(handle, [key(namespace="b")]) == [None]
        assert self.remove(handle, [key(namespace="b")]) == 0
        assert handle.put(key(namespace="b"), sized(10, 2)) is True
        assert_same(sized(10, 1), handle.get(key(namespace="a")))

    def test_purge_forgets_one_namespace(self, handle: H) -> None:
        for name in "abc":
            handle.put(key(name, "old"), entry())
        handle.put(key("a", "new"), entry())

        assert handle.purge("old") == 3
        assert handle.purge("old") == 0
        assert self.find(handle, [key(name, "old") for name in "abc"]) == [None] * 3
        assert handle.get(key("a", "new")) is not None
        assert handle.put(key("a", "old"), sized(10, 2)) is True
        assert_same(sized(10, 2), handle.get(key("a", "old")))

    @pytest.mark.fault(20)
    def test_a_spoiled_entry_is_a_miss_and_is_counted_and_forgotten(
        self, opened: Callable[[], H], spoil: Spoil
    ) -> None:
        opened().put(key(), sized(100, 1))
        spoil(key())
        handle = opened()
        before = handle.counts["corrupt"]

        assert handle.get(key()) is None
        assert handle.counts["corrupt"] == before + 1
        assert self.find(handle, [key()]) == [None]
        assert handle.put(key(), sized(100, 2)) is True
        assert_same(sized(100, 2), handle.get(key()))

    def test_many_threads_on_one_handle(self, handle: H) -> None:
        keys = [key(str(n)) for n in range(8)]
        started = threading.Barrier(8)

        def work(worker: int) -> int:
            started.wait()
            wrong = 0
            for turn in range(60):
                n = (worker + turn) % len(keys)
                if turn % 3 == 0:
                    handle.put(keys[n], sized(20_000, n))
                elif turn % 11 == 0:
                    self.remove(handle, [keys[n]])
                found = handle.get(keys[n])
                wrong += found is not None and bytes(found.data) != bytes(sized(20_000, n).data)
                del found
                self.find(handle, keys)
            return wrong

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(work, range(8))) == [0] * 8

    def test_a_handle_can_be_closed_twice(self, opened: Callable[[], H]) -> None:
        handle = opened()
        handle.put(key(), sized(10))
        handle.close()
        handle.close()

        assert opened().get(key()) is not None


class StoreContract(EntriesContract[Store]):
    entries_of_two: int | None = 2
    """Expected count in `stats` for two entries; None if a backend does not count them."""

    def find(self, handle: Store, keys: Sequence[EntryKey]) -> Sequence[EntryInfo | None]:
        return handle.lookup(keys)

    def remove(self, handle: Store, keys: Sequence[EntryKey]) -> int:
        return handle.delete(keys)

    @pytest.fixture
    def store(self, opened: Opened) -> Store:
        return opened()

    def test_an_entry_may_be_replaced(self, opened: Opened) -> None:
        store, other = opened(), opened()
        for fill, size in enumerate((100, 5000, 10)):
            new = sized(size, fill)
            assert store.put(key(), new, replace=True) is True
            assert_same(new, store.get(key()))
            assert_same(new, other.get(key()))
            assert other.put(key(), sized(100, 9)) is False
        assert [row.info for row in store.ls()] == store.lookup([key()])

    def test_a_view_of_many_dimensions_can_be_put(self, store: Store) -> None:
        payload = memoryview(bytes(range(24))).cast("B", (4, 6))
        store.put(key(), Entry(payload, "F16", (4, 3), "image"))

        assert_same(Entry(memoryview(bytes(range(24))), "F16", (4, 3), "image"), store.get(key()))

    @pytest.mark.parametrize("value", [b"bytes", 2**70, "\ud800", {1: 2}])
    def test_metadata_that_are_no_json_are_refused(self, store: Store, value: Any) -> None:
        with pytest.raises(TypeError):
            store.put(key(), entry(metadata={"value": value}))

        assert store.lookup([key()]) == [None]

    def test_metadata_are_read_as_json_has_them(self, store: Store) -> None:
        store.put(key(), entry(metadata={"none": float("nan"), "list": (1, 2)}))
        [info] = store.lookup([key()])

        assert info is not None
        assert info.metadata == {"none": None, "list": [1, 2]}

    def test_an_entry_with_long_metadata(self, store: Store) -> None:
        kept = entry(metadata={"frames": list(range(20_000))})
        store.put(key(), kept)
        [info] = store.lookup([key()])

        assert_same(kept, store.get(key()))
        assert info is not None
        assert info.metadata == kept.metadata

    def test_a_lease_returns_the_results_of_a_lookup(self, store: Store) -> None:
        store.put(key("a"), entry())
        keys = [key("none"), key("a")]

        assert store.lease(keys, 5) == store.lookup(keys)
        assert store.lease(keys, 0.5) == store.lookup(keys)
        assert store.lease([], 5) == []

    def test_a_leased_entry_can_be_deleted(self, store: Store) -> None:
        store.put(key(), entry())
        store.lease([key()], 60)

        assert store.delete([key()]) == 1
        assert store.lookup([key()]) == [None]

    def test_keys_with_equal_concatenated_parts_differ(self, store: Store) -> None:
        store.put(EntryKey("ab", "c"), sized(10, 1))

        assert store.get(EntryKey("a", "bc")) is None

    def test_purge_forgets_the_models_of_the_namespace(self, store: Store) -> None:
        store.register_namespace("m1", "old")
        store.register_namespace("m2", "new")
        store.purge("old")

        assert store.namespaces() == {"m2": "new"}

    def test_the_last_namespace_of_a_model_counts(self, opened: Opened) -> None:
        store = opened()

        assert store.namespaces() == {}
        store.register_namespace("org/model", "first")
        store.register_namespace("org/model", "second")
        store.register_namespace("../other\n", "third \ud800")
        assert opened().namespaces() == {"org/model": "second", "../other\n": "third \ud800"}

    def test_ls_lists_every_entry_once(self, store: Store) -> None:
        keys = [key(str(n)) for n in range(20)]
        for n, each in enumerate(keys):
            store.put(each, sized(2 * n))
        rows = list(store.ls())

        assert sorted(row.digest for row in rows) == sorted(each.digest for each in keys)
        assert {row.info.key for row in rows if row.info} == set(keys)
        assert all(row.problem is None for row in rows)
        assert all(row.info is not None and row.size_bytes >= row.info.size_bytes for row in rows)

    @pytest.mark.fault(20)
    @pytest.mark.security("S16")
    @pytest.mark.parametrize("kind", MALFORMED)
    def test_an_entry_with_a_value_of_the_wrong_type_is_corrupt(
        self, opened: Opened, kind: str
    ) -> None:
        opened().put(key(), malformed(kind))
        store = opened()

        [row] = store.verify()
        assert row.problem
        assert store.get(key()) is None
        assert store.stats().corrupt == 1
        assert store.lookup([key()]) == [None]
        assert store.put(key(), sized(100)) is True
        assert_same(sized(100), store.get(key()))

    @pytest.mark.fault(20)
    def test_verify_removes_entries_with_values_of_the_wrong_type(self, opened: Opened) -> None:
        store = opened()
        for kind in MALFORMED:
            store.put(key(kind), malformed(kind))
        store.put(key(), sized(100))

        assert sum(row.problem is not None for row in store.verify(fix=True)) == len(MALFORMED)
        assert [row.digest for row in store.verify()] == [key().digest]

    @pytest.mark.fault(93)
    def test_an_entry_of_another_format_is_a_miss_and_stays(self, opened: Opened) -> None:
        store = opened()
        with another_release():
            store.put(key("large"), sized(4 * 2**20))
            store.put(key(), sized(100))
        for each in (key(), key("large")):
            assert store.get(each) is None
            assert store.lookup([each]) == [None]
            assert store.lease([each], 5) == [None]
        rows = list(store.verify(fix=True))

        assert [row.problem for row in rows] == [None, None]
        assert all("ec_store/2" in (row.skipped or "") for row in rows)
        assert [row.skipped for row in store.ls()] == [row.skipped for row in rows]
        assert len(rows) == 2
        assert store.stats().corrupt == 0

    @pytest.mark.fault(93)
    @pytest.mark.parametrize("length", [100, 4 * 2**20])
    def test_a_put_replaces_an_entry_of_another_format(self, opened: Opened, length: int) -> None:
        store = opened()
        with another_release():
            store.put(key(), sized(100))

        assert store.put(key(), sized(length, 2)) is True
        assert store.put(key(), sized(length, 3)) is False
        assert_same(sized(length, 2), store.get(key()))
        assert len(list(store.ls())) == 1

    def test_verify_finds_and_removes_corrupt_entries(self, opened: Opened, spoil: Spoil) -> None:
        store = opened()
        for name in "abc":
            store.put(key(name), sized(100))
        spoil(key("b"))

        problems = {row.digest: row.problem for row in store.verify()}
        assert set(problems) == {key(name).digest for name in "abc"}
        assert [digest for digest, problem in problems.items() if problem] == [key("b").digest]
        assert [row.digest for row in store.verify(fix=True) if row.problem] == [key("b").digest]
        assert {row.digest for row in store.verify()} == {key("a").digest, key("c").digest}
        assert store.get(key("b")) is None

    def test_statistics(self, store: Store) -> None:
        store.put(key("a"), sized(1000))
        store.put(key("a"), sized(1000))
        store.put(key("b"), sized(1000))
        store.get(key("a"))
        store.get(key("none"))
        store.get(key("none"))
        stats = store.stats()

        assert (stats.puts, stats.hits, stats.misses) == (2, 1, 2)
        assert (stats.drops, stats.corrupt, stats.evictions) == (0, 0, 0)
        assert stats.entries == self.entries_of_two
        assert stats.bytes is not None
        assert stats.bytes >= 2000

    def test_sweep_keeps_entries_within_the_quota(self, store: Store) -> None:
        store.put(key(), entry())

        assert store.sweep() == 0
        assert_same(entry(), store.get(key()))

    def test_many_threads_on_one_handle(self, handle: Store) -> None:
        super().test_many_threads_on_one_handle(handle)
        assert handle.counts["corrupt"] == 0

    @pytest.mark.fault(22)
    def test_one_of_several_writers_of_a_key_writes(self, opened: Opened) -> None:
        stores = [opened() for _ in range(8)]
        started = threading.Barrier(8)

        def write(n: int) -> bool:
            started.wait()
            return stores[n].put(key(), sized(100_000, n))

        with ThreadPoolExecutor(8) as pool:
            written = list(pool.map(write, range(8)))
        found = stores[0].get(key())

        assert written.count(True) == 1
        assert_same(sized(100_000, written.index(True)), found)
