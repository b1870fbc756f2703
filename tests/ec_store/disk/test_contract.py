"""Contract of stores on directories."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ec_store import EntryKey, open_store
from ec_store.testing.claims import ClaimsContract
from ec_store.testing.stores import Opened, Spoil, StoreContract
from tests.ec_store.disk.on_disk import path_of


@pytest.fixture(params=["tmpfs", "disk"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path / "store"
    else:
        parent = Path(tempfile.mkdtemp(dir="/dev/shm"))
        yield parent / "store"
        shutil.rmtree(parent)


@pytest.fixture
def opened(root: Path) -> Iterator[Opened]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(open_store(root.as_uri()))


@pytest.fixture
def spoil(root: Path) -> Spoil:
    def flip(key: EntryKey) -> None:
        path = path_of(root, key)
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)

    return flip


class TestSharedDisk(StoreContract, ClaimsContract):
    pass
