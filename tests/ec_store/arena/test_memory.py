"""Memory of a server: what its allocation needs, and what a writer may do to the others' pages."""

import ctypes
import errno
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest

from ec_store.arena import memory
from ec_store.arena.extents import PAGE_BYTES
from ec_store.arena.memory import (
    HUGE_STEP_S,
    MADV_COLLAPSE,
    POPULATE_BYTES,
    create_memory,
    map_memory,
    populate,
)
from ec_store.testing.stores import assert_same, key, sized
from tests.ec_store.arena.served import (
    MIB,
    Serve,
    end,
    in_child,
    opened,
    refused,
    said,
    serving,
    stats,
    tell,
)

FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2  # <linux/falloc.h>


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
from functools import partial
from ec_store import serve
from ec_store.arena import memory
def check_room(_):
    print("step", flush=True)
    time.sleep(0.01)
memory.check_room = check_room
serve.create_memory = partial(memory.create_memory, step_bytes=4096)
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


@contextmanager
def group(limit_bytes: int) -> Iterator[Path]:
    """Yield the folder of a control group, below that of this process, with this much memory."""
    folder = memory_folder() / f"ec-store-{os.getpid()}"
    limits = [folder / name for name in ("memory.limit_in_bytes", "memory.max")]
    try:
        folder.mkdir()
        next(limit for limit in limits if limit.exists()).write_text(str(limit_bytes))
    except (OSError, StopIteration):
        pytest.skip("this process may not limit the memory of a control group")
    finally:
        if folder.is_dir() and not any(limit.exists() for limit in limits):
            folder.rmdir()
    yield folder
    folder.rmdir()


def peak_bytes(folder: Path) -> int:
    peak = next(folder.glob("memory.max_usage_in_bytes"), folder / "memory.peak")
    return int(peak.read_text())


def memory_folder() -> Path:
    """Return the folder of this process's control group with the memory controller."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, place = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / place.lstrip("/")
        if number == "0":
            second = Path("/sys/fs/cgroup") / place.lstrip("/")
    return second


@pytest.mark.fault(79)
def test_a_server_takes_nothing_if_its_control_group_has_too_little_memory(
    path: Path,
) -> None:
    """The kernel would kill it at 256 MiB."""
    with group(256 * MIB) as folder:
        ended = refused(
            f"shm://{path}?max_bytes=1GiB", lambda: (folder / "cgroup.procs").write_text("0")
        )
        peak = peak_bytes(folder)

    assert ended.returncode == 1
    assert "within the memory limit of the container" in ended.stderr
    assert peak < 200 * MIB


@pytest.mark.full
def test_a_full_server_stays_within_the_limit_that_its_guide_states(path: Path) -> None:
    """The smallest entries have the largest index: it is as large as it may be before the last."""
    quota, pages = 64 * MIB, 64 * MIB // PAGE_BYTES
    limit = quota + quota // 100 + 256 * MIB + 1024 * pages
    metadata = {"image_grid_thw": [[1, 36, 54]] * 8}
    with group(limit) as folder, ExitStack() as stack:
        stack.enter_context(Serve(path, quota, group=folder))
        writers = [stack.enter_context(opened(path)) for _ in range(2)]

        def fill(writer: int) -> None:
            for number in range(pages):
                entry = replace(sized(PAGE_BYTES // 2), metadata=metadata)
                assert writers[writer].put(key(f"{writer} {number}"), entry)

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(fill, range(2)))
        found = stats(path)
        peak = peak_bytes(folder)

    assert found.evictions > pages // 2
    assert quota < peak < limit


@pytest.mark.fault(79)
def test_an_allocation_ends_when_others_take_the_memory_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs_more = OSError(errno.ENOMEM, "it needs more")
    rooms = [None, None, None, needs_more]  # before all, and before each step
    monkeypatch.setattr(memory, "check_room", Mock(side_effect=rooms))
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    with pytest.raises(OSError, match="it needs more"):
        create_memory(4 * MIB + 4096, step_bytes=MIB)

    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


def test_a_populated_memory_is_written_without_page_faults() -> None:
    created = create_memory(16 * MIB)
    mapped = map_memory(created.fd, created.size_bytes, write=True)
    populate(mapped, write=True).join()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    mapped[::PAGE_BYTES] = 1
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    os.close(created.fd)

    assert faults < 100  # of 4096 pages


def test_the_population_ends_with_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    created = create_memory(64 * MIB)
    mapped = [map_memory(created.fd, created.size_bytes, write=False)]
    steps: list[int] = []
    monkeypatch.setattr(memory, "_madvise", lambda *step: steps.append(step[1]))
    started = threading.Event()

    def drop(_: float) -> None:
        assert started.wait(10)
        mapped.clear()

    monkeypatch.setattr(time, "sleep", drop)
    thread = populate(mapped[0], write=False)
    started.set()
    thread.join(10)
    os.close(created.fd)

    assert steps == [POPULATE_BYTES]


def test_a_mapped_memory_has_huge_pages() -> None:
    created = create_memory(8 * MIB)
    if created.pages == "pages of 4 KiB":
        pytest.skip("this kernel gives no huge pages")
    mapped = map_memory(created.fd, created.size_bytes, write=False)
    populate(mapped, write=False).join()
    os.close(created.fd)

    _, _, mapping = Path("/proc/self/smaps").read_text().partition(f"{mapped.ctypes.data:x}-")
    huge_kib = re.search("(?:ShmemPmdMapped|Shared_Hugetlb): +([0-9]+) kB", mapping)
    assert huge_kib is not None
    assert huge_kib[1] == "8192"


@pytest.mark.parametrize(
    ("refused", "took_s", "pages"),
    [
        (None, HUGE_STEP_S - 0.25, "huge pages of 2 MiB"),
        (MADV_COLLAPSE, 0.0, "pages of 4 KiB"),
        (None, HUGE_STEP_S, "pages of 4 KiB"),  # only the first step has huge ones
    ],
)
def test_a_memory_has_huge_pages_where_the_kernel_gives_them_soon(
    monkeypatch: pytest.MonkeyPatch, refused: int | None, took_s: float, pages: str
) -> None:
    now_s = count(0, took_s)
    monkeypatch.setattr(memory, "_madvise", lambda *call: -(call[2] == refused))
    # No multiple of 2 MiB: none is reserved for it.
    with monkeypatch.context() as slow:
        slow.setattr(time, "monotonic", lambda: next(now_s))
        created = create_memory(8 * MIB - 4096, step_bytes=2 * MIB)
    try:
        assert created.pages == pages
        assert os.fstat(created.fd).st_blocks * 512 == created.size_bytes
    finally:
        os.close(created.fd)


def test_a_descriptor_of_no_memory_is_an_error() -> None:
    read, write = os.pipe()
    with pytest.raises(OSError, match="No such device"):
        memory._map(read, 4096, write=False)  # noqa: SLF001
    os.close(read)
    os.close(write)


def test_a_memory_is_of_its_user_alone() -> None:
    created = create_memory(4096)
    assert os.fstat(created.fd).st_mode & 0o777 == 0o600
    os.close(created.fd)
