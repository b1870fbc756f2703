"""Eviction after a listing of entries that failed, and beside others that remove entries."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ec_store import StoreUnavailable
from ec_store.disk.eviction_policy import BLOCK_BYTES
from ec_store.disk.files import Folder
from ec_store.disk.store import SharedDiskStore
from tests.ec_store.contract import key, sized
from tests.ec_store.disk.on_disk import age, entries_bytes, opened, path_of

pytestmark = pytest.mark.fault(92)


def test_eviction_ends_if_others_free_the_space_meanwhile(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(root) as store, opened(root) as other:
        for n in range(200):
            store.put(key(str(n)), sized(100))
        store.configure(max_bytes=100 * BLOCK_BYTES)
        remove = Folder.remove_folder

        def others_remove(folder: Folder, name: str) -> bool:
            monkeypatch.undo()
            assert other.delete([key(str(n)) for n in range(120)]) >= 100
            return remove(folder, name)

        monkeypatch.setattr(Folder, "remove_folder", others_remove)

        assert store.evict() <= 16


def full_store(root: Path) -> SharedDiskStore:
    store = opened(root, f"max_bytes={20 * BLOCK_BYTES}")
    for n in range(20):
        store.put(key(str(n)), sized(100))
        age(path_of(root, key(str(n))), 100)
    return store


def failing_listings(monkeypatch: pytest.MonkeyPatch, root: Path, code: int, number: int) -> None:
    """Let the first `number` listings of the entries' top folder fail."""
    scan, failures = os.scandir, iter(range(number))
    top = (root / "entries").stat().st_ino

    def scandir(folder: Any) -> Any:
        if isinstance(folder, int) and os.fstat(folder).st_ino == top:
            for _ in failures:
                raise OSError(code, os.strerror(code))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", scandir)


CODES = pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EMFILE])


@CODES
@pytest.mark.parametrize("number", [1, 10**9])
def test_listings_that_fail_are_the_error_and_not_a_full_store(
    root: Path, monkeypatch: pytest.MonkeyPatch, code: int, number: int
) -> None:
    with full_store(root) as store:
        with monkeypatch.context() as patched:
            failing_listings(patched, root, code, number)
            with pytest.raises(StoreUnavailable, match=os.strerror(code)):
                store.put(key("new"), sized(100))
        # No second passes, in which a full store would drop entries without another check.
        assert store.put(key("new"), sized(100)) is True
        assert store.stats().drops == 1
        assert store.stats().bytes == entries_bytes(root)
