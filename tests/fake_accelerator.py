"""Fake `torch.accelerator` with several devices. A stream runs only when something waits for it.

So work runs as late as the code under test allows. A copy that does not wait for an event reads
memory that has not been written yet. A read that comes too early does not see the copied data.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import pytest
import torch

Work = Callable[[], object]


class FakeStream:
    """Queue of work; `with` makes it the current stream of this thread."""

    def __init__(self, fake: "FakeAccelerator", device: torch.device) -> None:
        self.fake = fake
        self.device = device
        self._work: list[Work] = []
        self._before: list[tuple[FakeStream | None, int]] = []

    def add(self, work: Work) -> None:
        self._work.append(work)

    def synchronize(self) -> None:
        self.fake.log.append("synchronize")
        self.run()

    def wait_event(self, event: "FakeEvent") -> None:
        self.fake.log.append("wait")
        self.add(event.run)

    def run(self, until: Work | None = None) -> None:
        with self.fake.lock:
            while self._work:
                work = self._work.pop(0)
                work()
                if work == until:
                    return

    def __enter__(self) -> Self:
        self._before.append((self.fake.current(), self.fake.index()))
        self.fake.set_device_index(self.device.index)
        self.fake.thread.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        stream, index = self._before.pop()
        self.fake.thread.stream = stream
        self.fake.set_device_index(index)  # as PyTorch does, whichever device was current before


class FakeEvent:
    """Event that fires when its stream reaches the point where it was recorded."""

    def __init__(self, fake: "FakeAccelerator", device: torch.device) -> None:
        self.fake = fake
        self.device = device
        self.fired = False
        self._stream: FakeStream | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        self._stream = stream or self.fake.current_stream(self.device)
        self._stream.add(self._fire)

    def run(self) -> None:
        if self._stream is not None and not self.fired:
            self._stream.run(self._fire)

    def synchronize(self) -> None:
        self.fake.log.append("synchronize")
        self.run()
        assert self.fired

    def query(self) -> bool:
        return self.fired

    def _fire(self) -> None:
        self.fired = True


class Storage:
    """Memory on a fake device, which is free when nothing refers to this object."""


class FakeTensor:
    """Tensor on a fake device; copies from it and to it are queued on the current stream."""

    def __init__(
        self,
        fake: "FakeAccelerator",
        data: torch.Tensor,
        device: torch.device,
        storage: Storage | None = None,
    ) -> None:
        self.fake = fake
        self.data = data
        self.device = device
        self.storage = storage or Storage()
        self.dtype, self.shape, self.nbytes = data.dtype, data.shape, data.nbytes
        self.ndim = data.ndim

    def detach(self) -> "FakeTensor":
        return self

    contiguous = detach

    def reshape(self, *shape: int) -> "FakeTensor":
        return self._viewed(self.data.reshape(*shape))

    def view(self, dtype: torch.dtype) -> "FakeTensor":
        return self._viewed(self.data.view(dtype))

    def __getitem__(self, index: slice) -> "FakeTensor":
        return self._viewed(self.data[index])

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> "FakeTensor":
        """Queue a copy from host memory, which is read when the copy runs."""
        assert non_blocking
        self.fake.copied.append(source)
        self.fake.current_stream(self.device).add(lambda: self.data.copy_(source))
        return self

    def _viewed(self, data: torch.Tensor) -> "FakeTensor":
        return FakeTensor(self.fake, data, self.device, self.storage)

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: tuple[Any, ...], _kwargs: Any = None
    ) -> Any:
        assert function is torch.Tensor.copy_, function
        host, source = args
        kept, data = weakref.ref(source.storage), source.data

        def copied() -> None:
            assert kept() is not None, "the tensor was released before it was copied"
            host.copy_(data)

        source.fake.current_stream(source.device).add(copied)
        return host


class FakeAccelerator:
    """Replacement for PyTorch's accelerator.

    Attributes:
        contexts: devices that were made current; each would occupy device memory.
        log: waits, in order.
        copied: host memory that was copied from, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.lock = threading.RLock()
        self.thread = threading.local()
        self.contexts: set[int] = set()
        self.log: list[str] = []
        self.copied: list[torch.Tensor] = []
        self._default: dict[int, FakeStream] = {}
        monkeypatch.setattr(torch, "Stream", lambda device: FakeStream(self, device))
        monkeypatch.setattr(torch, "Event", lambda device: FakeEvent(self, device))
        monkeypatch.setattr(torch.accelerator, "current_stream", self.current_stream)
        monkeypatch.setattr(torch.accelerator, "set_device_index", self.set_device_index)

    def index(self) -> int:
        """Return the current device of this thread, 0 by default."""
        return int(getattr(self.thread, "index", 0))

    def current(self) -> FakeStream | None:
        return getattr(self.thread, "stream", None)

    def set_device_index(self, index: int) -> None:
        self.contexts.add(index)
        self.thread.index = index

    def current_stream(self, device: torch.device) -> FakeStream:
        current = self.current()
        if current is not None and current.device == device:
            return current
        return self._default.setdefault(device.index, FakeStream(self, device))

    def tensor(self, values: torch.Tensor, index: int = 1) -> FakeTensor:
        """Return a tensor that queued work of its device's stream will fill."""
        device = torch.device("cuda", index)
        with torch.inference_mode(False):  # its device fills it outside of the model's step
            tensor = FakeTensor(self, torch.full_like(values, -1), device)
        data = tensor.data
        self.current_stream(device).add(lambda: data.copy_(values))
        return tensor

    def move_here(self, index: int = 1) -> None:
        """Make a device the one that models run on, where `torch.empty` makes tensors."""
        device = torch.device("cuda", index)
        real = torch.empty

        def empty(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") != device:
                return real(*args, **kwargs)
            with torch.inference_mode(False):  # its device fills it outside of the model's step
                data = real(*args, **{**kwargs, "device": "cpu"}).fill_(255)
            return FakeTensor(self, data, device)

        self._patch.setattr(torch, "empty", empty)
        self._patch.setattr(torch.accelerator, "current_accelerator", lambda **_: device)
        self._patch.setattr(torch.accelerator, "current_device_index", lambda: index)

    def read(self, tensors: Sequence[FakeTensor], values: list[torch.Tensor]) -> None:
        """Queue a read of tensors, as a model does; it appends what they are when it is run."""
        for tensor in tensors:
            self.current_stream(tensor.device).add(partial(self._append, tensor, values))

    @staticmethod
    def _append(tensor: FakeTensor, values: list[torch.Tensor]) -> None:
        values.append(tensor.data.clone())

    def finish(self) -> None:
        """Run all work of the devices' default streams, and nothing that only others wait for."""
        for stream in self._default.values():
            stream.run()
