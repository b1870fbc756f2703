"""Server of a host's memory for a benchmark, and its entries."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ec_store import Entry, EntryKey
from ec_store.arena.store import ArenaStore
from ec_store.arena.url import arena_options
from ec_store.errors import StoreUnavailable

NAMESPACE = "org/model@0123456789abcdef/encoder-0123456789abcdef/bf16/1"


def key(name: object) -> EntryKey:
    """Return the key of a name, as long as vLLM's."""
    return EntryKey(NAMESPACE, f"{name}".rjust(64, "0"))


def entry(data: memoryview) -> Entry:
    """Return the entry of a picture with these bytes."""
    return Entry(data, "BF16", (data.nbytes // 2,), "image", {"image_grid_thw": [1, 98, 98]})


def opened(path: Path) -> ArenaStore:
    """Open the memory at a path."""
    return ArenaStore(arena_options(f"shm://{path}?timeout=60s&verify=0"))


@contextmanager
def serving(size: str, *tiers: str) -> Iterator[tuple[Path, int]]:
    """Run `ec-store serve` with a memory of this size; yield its path and process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "arena.sock"
        command = [sys.executable, "-m", "ec_store", "serve", f"shm://{path}?max_bytes={size}"]
        flags = ["--port", "0", *(f"--tier={tier}" for tier in tiers)]
        with subprocess.Popen([*command, *flags], stdout=subprocess.DEVNULL) as server:
            try:
                with opened(path) as store:
                    while not _is_up(store):
                        if server.poll() is not None:
                            sys.exit("the server has not started")
                        time.sleep(0.05)
                yield path, server.pid
            finally:
                server.terminate()


def _is_up(store: ArenaStore) -> bool:
    try:
        store.stats()
    except StoreUnavailable:
        return False
    return True
