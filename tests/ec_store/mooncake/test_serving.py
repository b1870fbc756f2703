"""`ec-store serve` of two hosts with Mooncake behind both; this process has no such package."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from ec_store.arena.store import ArenaStore
from ec_store.arena.url import ArenaOptions
from ec_store.errors import StoreError
from ec_store.testing.stores import assert_same, key, sized
from tests.ec_store.mooncake.tiers import SEGMENT
from tests.ec_store.waiting import until
from tests.support.mooncake_server import MooncakeMaster, environment
from tests.support.redis_server import free_port

MIB = 2**20


@contextmanager
def served(socket: Path, tier: str) -> Iterator[tuple[ArenaStore, int]]:
    """Serve the memory of a host; yield a client of it, and the PID of the server."""
    url = f"shm://{socket}?max_bytes=64MiB"
    words = ["serve", url, "--port", str(free_port()), "--tier", tier]
    command = [sys.executable, "-m", "ec_store", *words]
    with subprocess.Popen(command, env=environment()) as process:
        try:
            with ArenaStore(ArenaOptions(str(socket), timeout_s=10)) as store:
                until(lambda: replies(store))
                yield store, process.pid
        finally:
            process.terminate()


def replies(store: ArenaStore) -> bool:
    try:
        store.stats()
    except StoreError:
        return False
    return True


def children(pid: int) -> list[psutil.Process]:
    """Return the processes of Mooncake's library that a server has."""
    return [
        each
        for each in psutil.Process(pid).children()
        if "ec_store.mooncake" in str(each.cmdline())
    ]


def found(store: ArenaStore, name: str) -> bool:
    try:
        return store.get(key(name)) is not None
    except StoreError:
        return False


def there(store: ArenaStore, name: str) -> bool:
    """Return whether a look-up finds an entry, which begins to fetch it."""
    return store.lookup([key(name)]) != [None] and found(store, name)


@pytest.mark.fault(143)
def test_an_entry_of_one_host_is_found_on_another_also_after_the_client_was_killed(
    master: MooncakeMaster, tmp_path: Path
) -> None:
    tier = master.url(f"{SEGMENT}&prefix=served")
    with ExitStack() as stack:
        one, _ = stack.enter_context(served(tmp_path / "one.sock", tier))
        other, pid = stack.enter_context(served(tmp_path / "other.sock", tier))
        until(lambda: len(children(pid)) == 2)
        written = 0

        def crosses() -> bool:
            """Write an entry on one host, and look it up on the other."""
            nonlocal written
            written += 1
            one.put(key(str(written)), sized(MIB, written))
            return any(there(other, str(written)) for _ in range(100))

        until(crosses)
        assert_same(sized(MIB, written), other.get(key(str(written))))
        for child in children(pid):
            child.kill()
        assert other.get(key(str(written))) is not None  # the memory serves on
        until(crosses)
    assert "mooncake" not in sys.modules
