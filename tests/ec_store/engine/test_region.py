"""Page in which workers report to their scheduler's process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: scripts/test.sh installs it")

from ec_store.engine.region import (  # noqa: E402 - only with torch
    MAX_READERS,
    Handle,
    Region,
    RegionReader,
)
from ec_store.engine.tensors import Loader  # noqa: E402
from tests.fake_accelerator import FakeAccelerator  # noqa: E402

NAME = bytes(range(16))


class Sent:
    """Object that a step keeps; `alive` has those that are kept."""

    alive: ClassVar[set[int]] = set()

    def __init__(self, number: int) -> None:
        self._number = number
        self.alive.add(number)

    def __del__(self) -> None:
        self.alive.discard(self._number)


def alive(region: Region) -> set[int]:
    region.release()
    return Sent.alive.copy()


def test_entries_of_a_step_are_kept_until_all_workers_have_read_it() -> None:
    region = Region(2)
    first, second = (RegionReader(region.shared_region().handle, number) for number in range(2))
    both = Sent(1)
    region.send([both])
    region.send([both, Sent(2)])
    del both
    kept = []
    for reader, number in ((first, 1), (first, 2), (second, 1), (second, 2)):
        reader.has_read(number)
        kept.append(alive(region))

    assert kept == [{1, 2}, {1, 2}, {1, 2}, set()]
    region.close()


def test_steps_refer_to_a_memory_once_all_workers_have_mapped_it() -> None:
    region = Region(2)
    mapped = [region.have_mapped(NAME)]
    readers = [RegionReader(region.shared_region().handle, number) for number in range(2)]
    for reader in readers:
        reader.has_mapped(NAME)
        mapped.append(region.have_mapped(NAME))
    readers[0].has_mapped(None)
    mapped.append(region.have_mapped(NAME))

    assert mapped == [False, False, True, False]
    region.close()


def test_region_that_the_kernel_refuses_raises_and_leaks_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "ftruncate", full)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - lists descriptors; its own is one of them
    with pytest.raises(OSError, match="No space left"):
        Region(1)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.parametrize("readers", [0, MAX_READERS + 1])
def test_readers_have_bounds(readers: int) -> None:
    with pytest.raises(ValueError, match="readers"):
        Region(readers)


def test_the_last_reader_has_its_own_row() -> None:
    region = Region(MAX_READERS)
    handle = region.shared_region().handle
    readers = [RegionReader(handle, number) for number in range(MAX_READERS)]
    for reader in readers[:-1]:
        reader.has_mapped(NAME)
    before = region.have_mapped(NAME)
    readers[-1].has_mapped(NAME)

    assert (before, region.have_mapped(NAME)) == (False, True)
    region.close()


def test_memory_of_another_process_is_not_mapped(tmp_path: Path) -> None:
    """In another PID namespace, the path may belong to any file."""
    region, other = Region(1), Region(1)
    handle = region.shared_region().handle
    (tmp_path / "file").write_bytes(handle.token)
    for path in (other.shared_region().handle.path, str(tmp_path / "file")):
        with pytest.raises(OSError, match="another file"):
            RegionReader(handle._replace(path=path), 0)
    region.close()
    other.close()
    with pytest.raises(OSError, match="No such file"):
        RegionReader(handle, 0)


KILLED = """
import os, signal, sys
from ec_store.engine.region import Region
region = Region(1)
path, token = region.shared_region().handle
print(path, token.hex(), flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_region_outlives_a_killed_scheduler_and_leaves_nothing_behind() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        path, token = process.stdout.readline().split()
        reader = RegionReader(Handle(path, bytes.fromhex(token)), 0)
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        process.communicate("\n")
    assert process.returncode == -9
    reader.has_read(0)

    assert reader.has_read_all()
    # Memory without a directory entry: the kernel frees it with its last user.
    assert "/memfd:ec-store (deleted)" in maps


def test_a_worker_without_the_mapping_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    region = Region(1)
    region.close()
    loader = Loader(7)
    for _ in range(3):
        loader.map_shared(region.shared_region())
    loader.finish(1)

    assert loader.reader is None
    [record] = caplog.records
    assert "worker 7" in record.getMessage()


def test_entries_of_a_step_are_kept_until_the_device_has_copied_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    region = Region(1)
    loader = Loader(0)
    loader.map_shared(region.shared_region())
    fake = FakeAccelerator(monkeypatch)
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: device)
    region.send([Sent(1)])
    loader.finish(region.shared_region().number)
    loader.finish(region.shared_region().number)
    loader.report_copies()
    assert alive(region) == {1}

    fake.current_stream(device).run()
    loader.report_copies()
    assert alive(region) == set()
    region.close()
