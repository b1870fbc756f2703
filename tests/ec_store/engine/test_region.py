"""Memory that a scheduler process shares with its workers."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: scripts/test.sh installs it")

from ec_store import memory_left  # noqa: E402 - only with torch
from ec_store.arena.extents import PAGE_BYTES  # noqa: E402
from ec_store.engine import region as region_module  # noqa: E402
from ec_store.engine.region import (  # noqa: E402
    HEADER_BYTES,
    MAX_READERS,
    Place,
    Region,
    RegionReader,
)
from ec_store.engine.tensors import Loader, to_device  # noqa: E402
from ec_store.memory_left import SPARE_BYTES  # noqa: E402
from tests.ec_store.waiting import until  # noqa: E402
from tests.fake_accelerator import FakeAccelerator  # noqa: E402

DATA = memoryview(bytes(range(256)) * 64)
SIZE = DATA.nbytes
assert SIZE % PAGE_BYTES == 0


def sent(region: Region, data: memoryview = DATA) -> Place:
    """Put bytes into a step, send it and drop the reference."""
    view = region.copy_in(data)
    assert view is not None
    place = region.find_place(view)
    assert place is not None
    region.send([view])
    return place


def test_all_workers_read_the_entries_of_the_region() -> None:
    region = Region(4 * SIZE, 2)
    readers = [RegionReader(region.shared_region().handle, number) for number in range(2)]
    place = sent(region)

    assert [bytes(reader.view(place).numpy()) for reader in readers] == [bytes(DATA)] * 2
    region.close()


def test_a_place_is_free_when_all_workers_have_read_its_step_and_it_is_forgotten() -> None:
    region = Region(4 * SIZE, 2)
    first, second = (RegionReader(region.shared_region().handle, number) for number in range(2))
    kept = region.copy_in(DATA)
    assert kept is not None
    region.send([kept])
    sent(region)
    taken = []
    for reader, number in ((first, 1), (first, 2), (second, 1), (second, 2)):
        reader.has_read(number)
        taken.append(region.taken_bytes() // SIZE)
    del kept

    assert taken == [2, 2, 2, 1]
    assert region.taken_bytes() == 0
    region.close()


def test_an_entry_of_two_steps_is_kept_until_the_second_has_read_it() -> None:
    region = Region(2 * SIZE, 1)
    reader = RegionReader(region.shared_region().handle, 0)
    view = region.copy_in(DATA)
    assert view is not None
    region.send([view])
    region.send([view])
    del view
    reader.has_read(1)
    assert region.taken_bytes() == SIZE
    reader.has_read(2)

    assert region.taken_bytes() == 0
    region.close()


def test_steps_refer_to_it_once_all_workers_have_mapped_it() -> None:
    region = Region(SIZE, 2)
    mapped = [region.is_mapped()]
    for number in range(2):
        RegionReader(region.shared_region().handle, number).has_read(0)
        mapped.append(region.is_mapped())

    assert mapped == [False, False, True]
    region.close()


def test_an_entry_larger_than_the_region_is_not_placed() -> None:
    region = Region(2 * SIZE, 1)
    views = [region.copy_in(DATA) for _ in range(3)]

    assert [view is not None for view in views] == [True, True, False]
    assert region.copy_in(memoryview(b"")) is None
    assert region.find_place(DATA) is None
    region.close()


def test_pages_are_allocated_when_it_is_made() -> None:
    region = Region(2**22, 1)
    path = region.shared_region().handle.path

    assert Path(path).stat().st_blocks * 512 >= 2**22 + HEADER_BYTES
    region.close()


def test_region_without_free_memory_raises_and_leaks_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - lists descriptors; its own is one of them
    with pytest.raises(OSError, match="No space left"):
        Region(SIZE, 1)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.fault(88)
def test_region_larger_than_the_memory_left_raises_before_it_touches_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel ends a process that exceeds the limit of its container."""
    touched: list[Any] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: touched.append(args))
    monkeypatch.setattr(memory_left, "available_bytes", lambda: SPARE_BYTES + SIZE)

    with pytest.raises(OSError, match="memory limit"):
        Region(2 * SIZE, 1)
    assert touched == []


def test_a_worker_maps_the_region_without_its_pages() -> None:
    """In Python 3.11 mapping the pages keeps the interpreter's lock, 0.3 s per GiB."""
    region = Region(64 * 2**20, 1)
    before = mapped_bytes()
    reader = RegionReader(region.shared_region().handle, 0)
    after = mapped_bytes()
    assert bytes(reader.view(sent(region)).numpy()) == bytes(DATA)
    region.close()

    assert after - before < 2**20


def mapped_bytes() -> int:
    """Return the pages of shared memory that this process has mapped, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssShmem:")[2].split()[0]) * 1024


@pytest.mark.parametrize("readers", [0, MAX_READERS + 1])
def test_readers_have_bounds(readers: int) -> None:
    with pytest.raises(ValueError, match="readers"):
        Region(SIZE, readers)


def test_the_last_reader_has_its_own_word() -> None:
    region = Region(SIZE, MAX_READERS)
    RegionReader(region.shared_region().handle, MAX_READERS - 1).has_read(0)
    place = sent(region)

    assert bytes(RegionReader(region.shared_region().handle, 0).view(place).numpy()) == bytes(DATA)
    region.close()


def test_memory_of_another_process_is_not_mapped() -> None:
    """In another PID namespace, the path may belong to any file."""
    region, other = Region(SIZE, 1), Region(SIZE, 1)
    handle = region.shared_region().handle
    with pytest.raises(OSError, match="another file"):
        RegionReader(handle._replace(path=other.shared_region().handle.path), 0)
    with pytest.raises(OSError, match="another file"):
        RegionReader(handle._replace(size_bytes=1), 0)
    region.close()
    other.close()
    with pytest.raises(OSError, match="No such file"):
        RegionReader(handle, 0)


KILLED = """
import os, signal, sys
from ec_store.engine.region import Region
region = Region(2**20, 1)
view = region.copy_in(memoryview(b"x" * 100))
path, size, token = region.shared_region().handle
print(path, size, token.hex(), *region.find_place(view), flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_region_outlives_a_killed_scheduler_and_leaves_nothing_behind() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        path, size, token, offset, length = process.stdout.readline().split()
        handle = region_module.RegionHandle(path, int(size), bytes.fromhex(token))
        reader = RegionReader(handle, 0)
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        process.communicate("\n")
    assert process.returncode == -9

    assert bytes(reader.view(Place(int(offset), int(length))).numpy()) == b"x" * 100
    # Memory without a directory entry: the kernel frees it with its last user.
    assert "/memfd:ec-store (deleted)" in maps
    assert "/dev/shm/" not in maps  # noqa: S108


def test_a_region_is_registered_once_and_each_entry_is_loaded_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(region_module, "register", registered.append)
    region = Region(8 * SIZE, 1)
    loader = Loader(0)
    for _ in range(3):
        loader.map_shared(region.shared_region())
    until(region.is_mapped)
    loaded = []
    for _ in range(3):
        loaded.append(to_device([loader.view(sent(region))], "F32", (16, SIZE // 64)))
        loader.finish(region.shared_region().number)
    loader.report_copies()

    assert len(registered) == 1
    assert registered[0].nbytes == 8 * SIZE + HEADER_BYTES
    assert [bytes(one.reshape(-1).view(torch.uint8).numpy()) for one in loaded] == [bytes(DATA)] * 3
    assert region.taken_bytes() == 0
    region.close()


def test_memory_is_unregistered_when_nothing_refers_to_it_and_before_it_is_unmapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A driver that still has the address registered copies from the old pages."""
    calls: list[tuple[str, bool]] = []

    def called(name: str, address: int) -> int:
        is_mapped = f"\n{address:012x}-" in Path("/proc/self/maps").read_text()
        calls.append((name, is_mapped))
        return 0

    cudart = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: called("register", address),
        cudaHostUnregister=lambda address: called("unregister", address),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    region = Region(SIZE, 1)
    reader = RegionReader(region.shared_region().handle, 0)
    view = reader.view(sent(region))
    del reader
    assert calls == [("register", True)]

    del view
    assert calls == [("register", True), ("unregister", True)]
    region.close()


def test_a_worker_without_the_mapping_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    region = Region(SIZE, 1)
    region.close()
    loader = Loader(7)
    for _ in range(3):
        loader.map_shared(region.shared_region())
    until(lambda: caplog.records)
    loader.finish(1)

    with pytest.raises(RuntimeError, match="not mapped"):
        loader.view(Place(0, SIZE))
    [record] = caplog.records
    assert "worker 7" in record.getMessage()
    assert not region.is_mapped()


def test_a_slot_is_held_until_the_device_has_copied_it(monkeypatch: pytest.MonkeyPatch) -> None:
    region = Region(2 * SIZE, 1)
    loader = Loader(0)
    loader.map_shared(region.shared_region())
    until(region.is_mapped)
    fake = FakeAccelerator(monkeypatch)
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: device)
    sent(region)
    loader.finish(region.shared_region().number)
    loader.finish(region.shared_region().number)
    loader.report_copies()
    assert region.taken_bytes() == SIZE

    fake.current_stream(device).run()
    loader.report_copies()
    assert region.taken_bytes() == 0
    region.close()
