"""Files of a store on a shared disk."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ec_store import EntryKey
from ec_store.disk import tree
from ec_store.disk.config import DiskConfig
from ec_store.disk.eviction_policy import taken_bytes
from ec_store.disk.files import Folder
from ec_store.disk.opening import LOOK_EVERY_S
from ec_store.disk.store import SharedDiskStore


def opened(
    root: Path, query: str = "", *, create: bool = True, look_every_s: float = LOOK_EVERY_S
) -> SharedDiskStore:
    config = DiskConfig.from_url(f"{root.as_uri()}?{query}")
    store = SharedDiskStore(config, create=create, look_every_s=look_every_s)
    store.check()
    return store


def path_of(root: Path, kept: EntryKey) -> Path:
    return root / "entries" / kept.digest[:2] / kept.digest[2:4] / kept.digest


def folder_of(root: Path) -> Folder:
    return Folder.open_path(str(root), 0o750)


def age(path: Path, seconds: float) -> None:
    then = path.lstat().st_mtime - seconds
    os.utime(path, (then, then), follow_symlinks=False)


@contextmanager
def later(seconds: float) -> Iterator[None]:
    """Let the clocks of this process be ahead."""
    wall, monotonic = time.time, time.monotonic
    with pytest.MonkeyPatch.context() as clocks:
        clocks.setattr(time, "time", lambda: wall() + seconds)
        clocks.setattr(time, "monotonic", lambda: monotonic() + seconds)
        yield


def entries_bytes(root: Path) -> int:
    """Return the disk space of all entries, in whole blocks."""
    return sum(
        taken_bytes(path.stat().st_size) for path in (root / "entries").rglob("*") if path.is_file()
    )


def files(root: Path, folder: str) -> list[Path]:
    return [path for path in (root / folder).rglob("*") if not path.is_dir()]


CALLS = (
    *("open", "close", "read", "pread", "write", "pwrite", "pwritev", "rename", "link", "unlink"),
    *("mkdir", "stat", "fstat", "fstatvfs", "utime", "fchmod", "scandir"),
)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count system calls, and files that a listing looks at."""
    counts: Counter[str] = Counter()
    real = {name: getattr(os, name) for name in CALLS}
    scan: Any = vars(tree)["_scan"]  # the stat of an entry is not a call of `os`

    def call(name: str) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return real[name](*args, **kwargs)

        return counting

    def scanning(*args: Any, **kwargs: Any) -> Any:
        found = scan(*args, **kwargs)
        counts["seen"] += len(found)
        return found

    for name in CALLS:
        setattr(os, name, call(name))
    vars(tree)["_scan"] = scanning
    try:
        yield counts
    finally:
        vars(tree)["_scan"] = scan
        for name in CALLS:
            setattr(os, name, real[name])
