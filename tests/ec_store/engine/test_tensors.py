"""Order and lifetime of copies, on a fake device that works as late as allowed."""

import threading
import weakref
from concurrent.futures import Future
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: scripts/test.sh installs it")

from ec_store.engine import tensors  # noqa: E402 - only with torch
from ec_store.engine.tensors import HostCopies, Output, to_device  # noqa: E402
from tests.ec_store.conftest import NoThreads  # noqa: E402
from tests.ec_store.waiting import until  # noqa: E402
from tests.fake_accelerator import FakeAccelerator  # noqa: E402

VALUES = torch.arange(4096, dtype=torch.float32).reshape(16, 256)
SIZE = VALUES.nbytes
WITHIN_S = 30.0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    return FakeAccelerator(monkeypatch)


def copy_of(wait: Any) -> Future[Any]:
    """Return the future that `wait` waits for."""
    copied: Future[Any] = wait.__self__
    return copied


def test_copies_contain_results_of_work_queued_before_them(fake: FakeAccelerator) -> None:
    ring = HostCopies(4 * SIZE)
    tensors = [fake.tensor(VALUES + number) for number in range(3)]
    waiting = [ring.start(tensor) for tensor in tensors]
    got = [wait() for wait in waiting if wait]
    ring.close()

    assert [host.equal(VALUES + number) for number, host in enumerate(got)] == [True] * 3
    assert fake.log[:2] == ["wait", "synchronize"]


def test_copies_make_no_context_on_another_device(fake: FakeAccelerator) -> None:
    """The thread starts on device 0; leaving a stream's context would make device 0 current."""
    ring = HostCopies(SIZE)
    wait = ring.start(fake.tensor(VALUES, index=3))
    assert wait
    wait()
    ring.close()

    assert fake.contexts == {3}


def test_a_tensor_is_released_when_it_is_copied_and_its_copy_still_waits(
    fake: FakeAccelerator,
) -> None:
    ring = HostCopies(SIZE)
    tensor = fake.tensor(VALUES)
    released = weakref.ref(tensor)
    wait = ring.start(tensor)
    del tensor
    assert wait
    until(lambda: released() is None)
    ring.close()

    assert wait().equal(VALUES)


def test_a_full_ring_refuses_until_a_copy_is_forgotten(fake: FakeAccelerator) -> None:
    ring = HostCopies(2 * SIZE)
    first = ring.start(fake.tensor(VALUES))
    second = ring.start(fake.tensor(VALUES + 1))
    assert first
    assert second
    assert ring.start(fake.tensor(VALUES)) is None
    view = memoryview(first().view(torch.uint8).reshape(-1).numpy())
    del first
    threading.Event().wait(0.01)
    assert ring.start(fake.tensor(VALUES)) is None
    del view

    until(lambda: (third := ring.start(fake.tensor(VALUES + 2))) and third().equal(VALUES + 2))
    assert second().equal(VALUES + 1)
    ring.close()


@pytest.mark.fault(87)
def test_copies_start_when_their_thread_can_be_started(
    fake: FakeAccelerator, no_threads: NoThreads
) -> None:
    ring = HostCopies(SIZE)
    with no_threads(), pytest.raises(RuntimeError, match="thread"):
        ring.start(fake.tensor(VALUES))
    wait = ring.start(fake.tensor(VALUES))  # the ring has room for one: the first one holds none
    assert wait
    assert wait().equal(VALUES)
    ring.close()


def test_a_tensor_larger_than_the_ring_is_copied_beside_it(fake: FakeAccelerator) -> None:
    ring = HostCopies(SIZE - 1)
    wait = ring.start(fake.tensor(VALUES))
    assert wait
    assert wait().equal(VALUES)
    ring.close()


def test_a_failed_copy_fails_only_its_entry(
    fake: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Output.copy_to
    failures = iter([RuntimeError("device")])

    def failing(*arguments: Any) -> None:
        for error in failures:
            raise error
        make(*arguments)

    monkeypatch.setattr(Output, "copy_to", failing)
    ring = HostCopies(2 * SIZE)
    broken, whole = (ring.start(fake.tensor(VALUES)) for _ in range(2))
    assert broken
    assert whole
    with pytest.raises(RuntimeError, match="device"):
        broken()
    assert whole().equal(VALUES)
    ring.close()


def test_a_device_that_cannot_be_used_fails_its_copies_and_not_later_ones(
    fake: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = fake.set_device_index
    failures = iter([RuntimeError("device"), RuntimeError("device")])

    def failing(index: int) -> None:
        for error in failures:
            raise error
        use(index)

    monkeypatch.setattr(torch.accelerator, "set_device_index", failing)
    ring = HostCopies(3 * SIZE)
    waiting = [ring.start(fake.tensor(VALUES + number, index=3)) for number in range(3)]
    first, second, third = map(copy_of, waiting)

    assert isinstance(first.exception(WITHIN_S), RuntimeError)
    assert isinstance(second.exception(WITHIN_S), RuntimeError)
    assert third.result(WITHIN_S).equal(VALUES + 2)
    ring.close()
    assert fake.contexts == {3}


@pytest.mark.parametrize(
    ("owner", "step"),
    [
        (torch, "Event"),
        (torch.accelerator, "current_stream"),
        (torch.accelerator, "set_device_index"),
        (tensors, "pinned_memory"),
        (Output, "copy_to"),
    ],
)
def test_a_failed_copy_leaves_its_place_in_the_ring(
    fake: FakeAccelerator, monkeypatch: pytest.MonkeyPatch, owner: Any, step: str
) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("device")

    ring = HostCopies(SIZE)
    with monkeypatch.context() as patch:
        patch.setattr(owner, step, failing)
        with pytest.raises(RuntimeError, match="device"):
            copy_of(ring.start(fake.tensor(VALUES))).result(WITHIN_S)

    until(lambda: (wait := ring.start(fake.tensor(VALUES))) and wait().equal(VALUES))
    ring.close()


def test_a_thread_that_cannot_be_started_is_started_by_the_next_copy(
    fake: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ring = HostCopies(2 * SIZE)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", failing)
        with pytest.raises(RuntimeError, match="thread"):
            ring.start(fake.tensor(VALUES))
    wait = ring.start(fake.tensor(VALUES + 1))

    assert copy_of(wait).result(WITHIN_S).equal(VALUES + 1)
    ring.close()


def test_a_tensor_on_the_cpu_is_not_copied() -> None:
    ring = HostCopies(0)
    wait = ring.start(VALUES)
    assert wait
    assert wait().data_ptr() == VALUES.data_ptr()
    ring.close()


def test_memory_is_pageable_where_pinning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    asked = []

    def refusing(*arguments: object, **more: object) -> object:
        asked.append(more.get("pin_memory", False))
        if asked[-1]:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*arguments, **more)

    monkeypatch.setattr(torch, "empty", refusing)
    assert tensors.pinned_memory(10).shape == (10,)
    assert asked == [True, False]


def test_a_tensor_is_put_where_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("meta"))
    placed = to_device([torch.zeros(SIZE, dtype=torch.uint8)], "F32", (16, 256))

    assert placed.device.type == "meta"
    assert (placed.dtype, tuple(placed.shape)) == (torch.float32, (16, 256))


def test_a_tensor_on_the_cpu_shares_no_memory_with_its_bytes() -> None:
    raw = VALUES.clone().view(torch.uint8).reshape(-1)
    placed = to_device([raw[:100], raw[100:]], "F32", (16, 256))
    raw.zero_()

    assert placed.equal(VALUES)
