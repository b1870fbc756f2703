"""Server and clients in namespaces of their own, as containers of one host are."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ec_store.errors import StoreUnavailable
from ec_store.testing.stores import key, sized
from tests.ec_store.arena.served import MIB, opened, said, stats, tell, until

CONTAINER = [
    *("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"),
    *("--ipc", "--net", "--uts"),
]
CLIENT = """
import sys
from pathlib import Path
from tests.ec_store.arena.served import *
from ec_store.testing.stores import *
store = opened(Path(sys.argv[1]))
print("ready", flush=True)
"""
WRITER = """
assert store.put(key("a"), sized(MIB, 1)) and store.put(key("b"), sized(MIB, 2))
print("written", flush=True)
sys.stdin.readline()
"""
READER = """
found = store.get(key("a"))
assert_same(found, sized(MIB, 1))
pinned = store.pin(key("b"))
assert b"".join(pinned.parts) == sized(MIB, 2).data.tobytes()
print("pinned", flush=True)
sys.stdin.readline()
"""

pytestmark = pytest.mark.skipif(
    subprocess.run([*CONTAINER, "true"], check=False, capture_output=True).returncode != 0,
    reason="this process may not create namespaces",
)


@contextmanager
def container(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run code in a container that shares the file system, and kill it at the end."""
    command = [*CONTAINER, sys.executable, "-c", code, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=Path.cwd()) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def server(path: Path) -> Iterator[None]:
    code = "import sys; from ec_store.__main__ import main; main(sys.argv[1:])"
    with container(code, "serve", f"shm://{path}?max_bytes={8 * MIB}", "--port", "0"):
        deadline_s = time.monotonic() + 30
        while True:
            try:
                stats(path)
            except StoreUnavailable:
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
            else:
                break
        yield


def test_containers_share_the_memory_of_their_host(path: Path) -> None:
    """They see neither each other's processes nor networks, only the folder with the socket."""
    with ExitStack() as containers:
        containers.enter_context(server(path))
        writer = containers.enter_context(container(CLIENT + WRITER, str(path)))
        assert [said(writer), said(writer)] == ["ready", "written"]
        reader = containers.enter_context(container(CLIENT + READER, str(path)))
        assert [said(reader), said(reader)] == ["ready", "pinned"]

        assert stats(path).memory.pinned_bytes == 2 * MIB
        tell(writer)
        assert writer.wait(10) == 0


@pytest.mark.fault(81)
def test_memory_of_a_killed_container_is_free_at_once(path: Path) -> None:
    """The server knows its process by a descriptor, since Linux 6.5: it sees no PID."""
    with ExitStack() as containers:
        containers.enter_context(server(path))
        with opened(path) as store:
            store.put(key("a"), sized(MIB, 1))
            store.put(key("b"), sized(MIB, 2))
        reader = containers.enter_context(container(CLIENT + READER, str(path)))
        assert [said(reader), said(reader)] == ["ready", "pinned"]
        assert stats(path).memory.pinned_bytes == 2 * MIB
        reader.kill()

        until(path, pinned_bytes=0, gone_bytes=0)
