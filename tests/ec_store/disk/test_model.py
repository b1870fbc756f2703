"""Two handles on a small store, compared with a dictionary."""

import os
import shutil
import time
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from ec_store import Entry, EntryKey, StoreUnavailable
from ec_store.testing.stores import assert_same, key, sized
from tests.ec_store.disk.on_disk import entries_bytes, opened
from tests.examples import scaled


class Model(RuleBasedStateMachine):
    """Two handles on a store of about 20 entries, and the entries that they may contain."""

    keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(os.environ.get("PYTEST_DEBUG_TEMPROOT", "/dev/shm"))  # noqa: S108
        self.root = self.folder / f"ec_store-model-{os.getpid()}-{time.monotonic_ns()}"
        self.stores = [opened(self.root, "max_bytes=128KiB") for _ in range(2)]
        self.put_in: dict[EntryKey, Entry] = {}
        self.leased: set[EntryKey] = set()

    @rule(target=keys, name=st.integers(0, 60))
    def name(self, name: int) -> EntryKey:
        return key(str(name))

    @rule(each=keys, seed=st.integers(0, 9), length=st.integers(0, 3000), n=st.integers(0, 1))
    def put(self, each: EntryKey, seed: int, length: int, n: int) -> None:
        kept = sized(length * 2, seed)
        try:
            if self.stores[n].put(each, kept):
                assert each not in self.leased
                self.put_in[each] = kept
        except StoreUnavailable:
            assert self.leased

    @rule(each=keys, n=st.integers(0, 1))
    def get(self, each: EntryKey, n: int) -> None:
        found = self.stores[n].get(each)
        if found is not None or each in self.leased:
            assert_same(self.put_in[each], found)

    @rule(each=keys, n=st.integers(0, 1))
    def lease(self, each: EntryKey, n: int) -> None:
        if len(self.leased) < 8 and self.stores[n].lease([each], 600)[0]:
            self.leased.add(each)

    @rule(each=consumes(keys), n=st.integers(0, 1))
    def delete(self, each: EntryKey, n: int) -> None:
        deleted = self.stores[n].delete([each])
        assert deleted <= (each in self.put_in)
        assert deleted or each not in self.leased
        self.put_in.pop(each, None)
        self.leased.discard(each)

    @rule(n=st.integers(0, 1))
    def evict(self, n: int) -> None:
        self.stores[n].evict()

    @invariant()
    def the_quota_holds_and_the_sum_is_right(self) -> None:
        size = entries_bytes(self.root)
        assert size <= 128 * 1024
        assert self.stores[0].stats().bytes == size
        assert {row.digest for row in self.stores[0].ls()} <= {each.digest for each in self.put_in}
        assert self.stores[0].stats().corrupt == 0

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        shutil.rmtree(self.root)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=scaled(40), stateful_step_count=60)
