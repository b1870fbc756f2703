"""Store on disk, and a check of its ledger after every test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ec_store.disk import ledger
from ec_store.disk.eviction_policy import taken_bytes
from ec_store.disk.files import Folder
from ec_store.disk.store import SharedDiskStore
from tests.ec_store.disk.on_disk import files, opened


@pytest.fixture
def store(root: Path) -> Iterator[SharedDiskStore]:
    with opened(root) as store:
        yield store


@pytest.fixture(autouse=True)
def ledger_check(request: pytest.FixtureRequest, root: Path) -> Iterator[None]:
    """Compare the ledger with the files of entries, unless a test is marked `changes_files`."""
    yield
    if request.node.get_closest_marker("changes_files") or not (root / "ledger").exists():
        return
    total = ledger.total(Folder.open_path(str(root), 0o750))
    sizes = [taken_bytes(path.lstat().st_size) for path in files(root, "entries")]
    assert (total.entries, total.bytes) == (len(sizes), sum(sizes))
