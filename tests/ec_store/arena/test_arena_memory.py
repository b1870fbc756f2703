"""Memory of a server: what its allocation needs, and what a writer may do to the others' pages."""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ec_store.arena.served import MIB, Serve, end, in_child, opened, said, serving, tell
from tests.ec_store.contract import assert_same, key, sized

MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2  # <linux/falloc.h>


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "arena.sock"


def punch(fd: int, offset: int, size: int) -> None:
    """Take pages of a memory away, which no seal forbids that lets clients write."""
    libc = ctypes.CDLL(None, use_errno=True)
    flags = FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
    done = libc.fallocate(fd, flags, ctypes.c_long(offset), ctypes.c_long(size))
    assert done == 0, os.strerror(ctypes.get_errno())


def test_pages_that_a_writer_takes_away_read_as_zeros_and_end_no_process(path: Path) -> None:
    with serving(path, 8 * MIB) as server, opened(path) as store:
        store.put(key(), sized(MIB, 1))
        found = store.get(key())
        child = in_child(
            path,
            "found = store.get(key()); print('ready', flush=True); sys.stdin.readline()\n"
            "print(sum(found.data.cast('B')), flush=True)",
        )
        assert found is not None
        punch(server._memory.fd, 0, 8 * MIB)  # noqa: SLF001 - as a writer's descriptor allows
        tell(child)
        assert said(child) == "0"
        end(child)

        assert not any(found.data)
        assert store.put(key("more"), sized(MIB, 2)) is True
        assert_same(sized(MIB, 2), store.get(key("more")))


SLOW = """
import sys, time
from ec_store.arena import memory
memory.STEP_BYTES = 4096
def check_room(_):
    print("step", flush=True)
    time.sleep(0.01)
memory.check_room = check_room
from ec_store.__main__ import main
main(["serve", sys.argv[1], "--port", "0"])
"""


@pytest.mark.fault(80)
def test_a_signal_ends_a_server_that_allocates_its_memory(path: Path) -> None:
    """The allocation has 16,384 steps of 10 ms."""
    command = [sys.executable, "-c", SLOW, f"shm://{path}?max_bytes={64 * MIB + 4096}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert said(server) == "step"
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
        assert server.returncode == 0

    served = Serve(path)
    served.start()
    served.kill()
