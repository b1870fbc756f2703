"""Check of the ledger after every test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ec_store.disk.files import Folder, Modes
from ec_store.disk.ledger import Ledger
from ec_store.disk.tree import taken_bytes
from tests.ec_store.disk.on_disk import files


@pytest.fixture(autouse=True)
def ledger_check(request: pytest.FixtureRequest, root: Path) -> Iterator[None]:
    """Compare the ledger with the files of entries, unless a test is marked `changes_files`."""
    yield
    if request.node.get_closest_marker("changes_files") or not (root / "usage").is_dir():
        return
    total = Ledger().total(Folder.open_path(str(root / "usage"), Modes()))
    # By inode: a published entry may have the name of its staging file too.
    sizes = {path.lstat().st_ino: path.lstat().st_size for path in files(root, "entries")}
    assert (total.entries, total.bytes) == (len(sizes), sum(map(taken_bytes, sizes.values())))
