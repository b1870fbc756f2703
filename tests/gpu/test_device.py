"""Copies between a real device and host memory. tests/ec_store/engine checks their order."""

import os
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ec_store.arena.memory import create_memory, map_memory  # noqa: E402 - only with torch
from ec_store.engine import region as region_module  # noqa: E402
from ec_store.engine.region import Region  # noqa: E402
from ec_store.engine.tensors import (  # noqa: E402
    HostCopies,
    Loader,
    Output,
    as_tensor,
    new_stream,
    pinned_memory,
    to_device,
)
from tests.ec_store.waiting import until  # noqa: E402

MIB = 2**20
LONG = 200_000_000
"""Cycles that keep a device busy for about 0.1 s."""


def bytes_of(values: Any) -> memoryview:
    """Return the bytes of a tensor in host memory."""
    return memoryview(values.reshape(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_copies_are_right_while_streams_compute(dtype: str) -> None:
    ring = HostCopies(64 * MIB)
    other = torch.cuda.Stream()
    waiting, expected = [], []
    for number in range(8):
        with torch.cuda.stream(other):
            torch.cuda._sleep(LONG // 4)  # noqa: SLF001 - PyTorch's own tests use it
        tensor = torch.zeros(1024, 1024, device="cuda", dtype=getattr(torch, dtype))
        torch.cuda._sleep(LONG)  # noqa: SLF001
        tensor += number + 1
        waiting.append(ring.start(tensor))
        expected.append(torch.full((1024, 1024), number + 1, dtype=tensor.dtype))
        del tensor
        torch.empty(1024, 1024, device="cuda", dtype=getattr(torch, dtype)).fill_(-1)

    assert [wait().equal(one) for wait, one in zip(waiting, expected, strict=True) if wait] == [
        True
    ] * 8
    ring.close()


def test_a_part_of_a_batch_is_copied_contiguously() -> None:
    ring = HostCopies(64 * MIB)
    batch = torch.arange(4096, device="cuda", dtype=torch.float32).reshape(64, 64)
    wait = ring.start(batch[8:16, ::2])
    assert wait
    host = wait()

    assert host.is_contiguous()
    assert host.equal(batch[8:16, ::2].cpu())
    ring.close()


def test_a_copy_follows_the_work_queued_before_it_without_blocking() -> None:
    ring = HostCopies(64 * MIB)
    warm = ring.start(torch.zeros(8, device="cuda"))
    assert warm
    warm()
    tensor = torch.zeros(MIB, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)  # noqa: SLF001
    made = torch.cuda.Event()
    tensor += 1
    made.record()
    wait = ring.start(tensor)
    started_before_it_was_made = not made.query()
    assert wait
    host = wait()

    assert started_before_it_was_made
    assert made.query()
    assert host.eq(1).all()
    ring.close()


def test_device_memory_is_free_while_copies_wait() -> None:
    ring = HostCopies(128 * MIB)
    before = torch.cuda.memory_allocated()
    waiting = []
    for _ in range(16):
        tensor = torch.ones(2 * MIB, device="cuda")
        waiting.append(ring.start(tensor))
        del tensor
    until(lambda: torch.cuda.memory_allocated() <= before)

    assert all(wait and wait().eq(1).all() for wait in waiting)
    ring.close()


def test_copies_are_in_pinned_memory() -> None:
    ring = HostCopies(4 * MIB)
    wait = ring.start(torch.ones(MIB // 4, device="cuda"))
    assert wait
    assert wait().is_pinned()
    assert pinned_memory(16).is_pinned()
    ring.close()


@pytest.mark.parametrize("ready_made", [False, True], ids=["pageable", "pinned"])
def test_entries_are_put_on_the_device(ready_made: bool) -> None:
    values = torch.randn(256, 1024)
    raw = values.reshape(-1).view(torch.uint8)
    placed = to_device([raw.pin_memory() if ready_made else raw], "F32", (256, 1024))

    assert placed.is_cuda
    assert placed.cpu().equal(values)


def test_the_region_is_registered_once_and_copied_from_directly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    cudart = torch.cuda.cudart()

    def register(address: int, size: int, flags: int) -> object:
        calls.append(size)
        return cudart.cudaHostRegister(address, size, flags)

    fake = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=cudart.cudaHostUnregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    region, loader = Region(64 * MIB, 1), Loader(0)
    for _ in range(3):
        loader.map_shared(region.shared_region())
    until(region.is_mapped)
    reader = loader.reader
    assert reader is not None
    assert reader.registered
    values = torch.randn(1024, 1024)
    for _ in range(40):  # more than the region holds at once
        view = region.copy_in(bytes_of(values))
        assert view is not None
        place = region.find_place(view)
        assert place is not None
        assert reader.view(place).is_pinned()
        region.send([view])
        del view
        placed = to_device([loader.view(place)], "F32", (1024, 1024))
        loader.finish(region.shared_region().number)
        assert placed.cpu().equal(values)
        loader.report_copies()

    assert calls == [region.shared_region().handle.size_bytes]
    region.close()


def test_memory_at_an_address_that_was_registered_before_is_read_itself() -> None:
    """The kernel reuses the address; the driver must not use the old pages."""
    for number in range(4):
        region, loader = Region(64 * MIB, 1), Loader(0)
        loader.map_shared(region.shared_region())
        until(region.is_mapped)
        reader = loader.reader
        assert reader is not None
        assert reader.registered
        view = region.copy_in(bytes_of(torch.full((MIB,), float(number))))
        assert view is not None
        place = region.find_place(view)
        assert place is not None
        assert to_device([loader.view(place)], "F32", (MIB,)).eq(number).all()
        region.close()
        del region, loader, reader, view


def test_a_slot_is_held_until_the_device_has_copied_it() -> None:
    region, loader = Region(64 * MIB, 1), Loader(0)
    loader.map_shared(region.shared_region())
    until(region.is_mapped)
    view = region.copy_in(bytes_of(torch.ones(MIB)))
    assert view is not None
    place = region.find_place(view)
    assert place is not None
    region.send([view])
    del view
    torch.cuda._sleep(LONG)  # noqa: SLF001
    placed = to_device([loader.view(place)], "F32", (MIB,))
    loader.finish(region.shared_region().number)
    loader.report_copies()
    taken = region.taken_bytes()
    torch.cuda.synchronize()
    loader.report_copies()

    assert taken == 4 * MIB
    assert region.taken_bytes() == 0
    assert placed.eq(1).all()
    region.close()


def test_a_rejected_registration_does_not_fail_later_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> int:
        return 2

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=refused))
    assert not region_module.register(np.zeros(4096, np.uint8))
    region, loader = Region(4 * MIB, 1), Loader(0)
    loader.map_shared(region.shared_region())
    until(region.is_mapped)
    view = region.copy_in(bytes_of(torch.ones(1024)))
    assert view is not None
    place = region.find_place(view)
    assert place is not None

    assert to_device([loader.view(place)], "F32", (1024,)).eq(1).all()
    region.close()


SEGMENT_BYTES = 4 * MIB
BORDER = [(3 * MIB, MIB), (SEGMENT_BYTES, 3 * MIB)]
"""Extents of an entry of 4 MiB, on both sides of the border between two segments."""


class Host:
    """Memory of a host with two segments, mapped to write and to read.

    Attributes:
        written, read: the two mappings.
    """

    def __init__(self) -> None:
        self._memory = create_memory(2 * SEGMENT_BYTES, SEGMENT_BYTES)
        fd = os.open(f"/proc/self/fd/{self._memory.fd}", os.O_RDONLY)
        self.written = map_memory(self._memory.fd, 2 * SEGMENT_BYTES, write=True)
        self.read = map_memory(fd, 2 * SEGMENT_BYTES, write=False)
        os.close(fd)
        os.close(self._memory.fd)


def register_all(memory: Any) -> list[bool]:
    begins = range(0, len(memory), SEGMENT_BYTES)
    return [region_module.register(memory, begin, begin + SEGMENT_BYTES) for begin in begins]


def parts_of(memory: Any, extents: list[tuple[int, int]] = BORDER) -> list[Any]:
    return [as_tensor(memory[begin : begin + size].data) for begin, size in extents]


def stored(host: Host, values: Any, stream: Any) -> None:
    Output(values).copy_to([torch.from_numpy(host.written[a : a + n]) for a, n in BORDER], stream)


@pytest.mark.parametrize("registered", [True, False])
def test_an_entry_on_both_sides_of_a_border_is_written_and_read(registered: bool) -> None:
    host, stream = Host(), new_stream(torch.device("cuda", torch.cuda.current_device()))
    if registered:
        assert register_all(host.written) == [True, True]
        register_all(host.read)  # the driver may refuse: copies go through pinned memory then
    assert [part.is_pinned() for part in parts_of(host.written)] == [registered] * 2
    values = torch.randn(1024, 1024, device="cuda")
    torch.cuda._sleep(LONG)  # noqa: SLF001
    values += 1
    stored(host, values, stream)

    assert to_device(parts_of(host.read), "F32", (1024, 1024)).equal(values)


def test_a_read_only_mapping_is_registered_for_reading_or_not_at_all() -> None:
    host = Host()
    registered = register_all(host.read)

    assert [part.is_pinned() for part in parts_of(host.read)] == registered
    assert not host.read.flags.writeable


def test_segments_are_registered_while_kernels_run_and_copies_are_made() -> None:
    host, device = Host(), torch.device("cuda", torch.cuda.current_device())
    stream = new_stream(device)
    done: list[bool] = []

    def run() -> None:
        torch.cuda.set_device(device)
        for memory in (host.written, host.read):
            done.extend(register_all(memory))

    registering = threading.Thread(target=run)
    registering.start()
    for number in range(20):
        torch.cuda._sleep(LONG // 20)  # noqa: SLF001
        values = torch.full((1024, 1024), float(number), device="cuda")
        stored(host, values, stream)
        assert to_device(parts_of(host.read), "F32", (1024, 1024)).equal(values)
    registering.join()

    assert done[:2] == [True, True]


def test_memory_of_a_host_is_free_after_its_last_view() -> None:
    """The driver unregisters it before the kernel unmaps it, so that it can be mapped again."""
    for number in range(4):
        host, stream = Host(), new_stream(torch.device("cuda", torch.cuda.current_device()))
        assert register_all(host.written) == [True, True]
        register_all(host.read)
        stored(host, torch.full((1024, 1024), float(number), device="cuda"), stream)
        assert to_device(parts_of(host.read), "F32", (1024, 1024)).eq(number).all()
        del host


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one device")
def test_two_devices_use_one_memory_by_their_index() -> None:
    host = Host()
    assert register_all(host.written) == [True, True]
    results = []
    for index in (1, 0):
        torch.cuda.set_device(index)
        stream = new_stream(torch.device("cuda", index))
        values = torch.randn(1024, 1024, device=f"cuda:{index}")
        stored(host, values, stream)
        read = to_device(parts_of(host.written), "F32", (1024, 1024))
        results.append((read.device.index, bool(read.equal(values))))

    assert results == [(1, True), (0, True)]
