"""Check of the ledger after every test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ec_store.disk.eviction_policy import taken_bytes
from ec_store.disk.files import Folder, Modes
from ec_store.disk.ledger import Ledger
from tests.ec_store.disk.on_disk import files


@pytest.fixture(autouse=True)
def ledger_check(request: pytest.FixtureRequest, root: Path) -> Iterator[None]:
    """Compare the ledger with the files of entries, unless a test is marked `changes_files`.

    A staging file that could not be removed may be charged or not.
    """
    yield
    if request.node.get_closest_marker("changes_files") or not (root / "ledger").exists():
        return
    total = Ledger().total(Folder.open_path(str(root), Modes()))
    found = files(root, "entries")
    sizes = {path.lstat().st_ino: taken_bytes(path.lstat().st_size) for path in found}
    entries = {path.lstat().st_ino for path in found if path.suffix != ".tmp"}
    assert len(entries) <= total.entries <= len(sizes)
    assert sum(map(sizes.__getitem__, entries)) <= total.bytes <= sum(sizes.values())
