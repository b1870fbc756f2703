"""Order and lifetime of copies, on a fake device that works as late as allowed."""

import weakref
from concurrent.futures import Future
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: scripts/test.sh installs it")

from ec_store.engine import tensors  # noqa: E402 - only with torch
from ec_store.engine.tensors import HostCopies, Output, to_device  # noqa: E402
from tests.ec_store.conftest import NoThreads  # noqa: E402
from tests.fake_accelerator import FakeAccelerator, until  # noqa: E402

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
    copies = HostCopies()
    tensors = [fake.tensor(VALUES + number) for number in range(3)]
    waiting = [copies.start(tensor) for tensor in tensors]
    got = [wait() for wait in waiting]
    copies.close()

    assert [host.equal(VALUES + number) for number, host in enumerate(got)] == [True] * 3
    assert fake.log[:2] == ["wait", "synchronize"]


def test_copies_make_no_context_on_another_device(fake: FakeAccelerator) -> None:
    """The thread starts on device 0; leaving a stream's context would make device 0 current."""
    copies = HostCopies()
    wait = copies.start(fake.tensor(VALUES, index=3))
    wait()
    copies.close()

    assert fake.contexts == {3}


def test_a_tensor_is_released_when_it_is_copied_and_its_copy_still_waits(
    fake: FakeAccelerator,
) -> None:
    copies = HostCopies()
    tensor = fake.tensor(VALUES)
    released = weakref.ref(tensor)
    wait = copies.start(tensor)
    del tensor
    until(lambda: released() is None)
    copies.close()

    assert wait().equal(VALUES)


@pytest.mark.fault(87)
def test_copies_start_when_their_thread_can_be_started(
    fake: FakeAccelerator, no_threads: NoThreads
) -> None:
    copies = HostCopies()
    with no_threads(), pytest.raises(RuntimeError, match="thread"):
        copies.start(fake.tensor(VALUES))
    wait = copies.start(fake.tensor(VALUES))
    assert wait().equal(VALUES)
    copies.close()


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
    copies = HostCopies()
    broken, whole = (copies.start(fake.tensor(VALUES)) for _ in range(2))
    with pytest.raises(RuntimeError, match="device"):
        broken()
    assert whole().equal(VALUES)
    copies.close()


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
    copies = HostCopies()
    waiting = [copies.start(fake.tensor(VALUES + number, index=3)) for number in range(3)]
    first, second, third = map(copy_of, waiting)

    assert isinstance(first.exception(WITHIN_S), RuntimeError)
    assert isinstance(second.exception(WITHIN_S), RuntimeError)
    assert third.result(WITHIN_S).equal(VALUES + 2)
    copies.close()
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
def test_a_copy_that_fails_at_any_step_costs_no_later_one(
    fake: FakeAccelerator, monkeypatch: pytest.MonkeyPatch, owner: Any, step: str
) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("device")

    copies = HostCopies()
    with monkeypatch.context() as patch:
        patch.setattr(owner, step, failing)
        with pytest.raises(RuntimeError, match="device"):
            copy_of(copies.start(fake.tensor(VALUES))).result(WITHIN_S)

    assert copies.start(fake.tensor(VALUES))().equal(VALUES)
    copies.close()


def test_a_tensor_on_the_cpu_is_not_copied() -> None:
    copies = HostCopies()
    wait = copies.start(VALUES)
    assert wait().data_ptr() == VALUES.data_ptr()
    copies.close()


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
