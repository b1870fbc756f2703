"""Encode seconds of items, from the time of earlier steps."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from ec_store.engine import encode_timer
from ec_store.engine.encode_timer import FEWEST, PENDING, SAMPLES, EncodeTimer


class Device:
    """Fake device: an event has passed when the device has come to its time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queued_s = 0.0
        self.reached_s = 0.0
        self.events = 0
        accelerator = SimpleNamespace(
            current_accelerator=lambda check_available: torch.device("cuda"),
            current_stream=lambda: None,
        )
        fake = SimpleNamespace(accelerator=accelerator, Event=self._event)
        monkeypatch.setattr(encode_timer, "torch", fake)

    def _event(self, _device: torch.device, *, enable_timing: bool) -> Any:
        assert enable_timing
        self.events += 1
        at_s = self.queued_s
        return SimpleNamespace(
            at_s=at_s,
            record=lambda _stream: None,
            query=lambda: self.reached_s >= at_s,
            elapsed_time=lambda other: (other.at_s - at_s) * 1000,
        )


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def step(timer: EncodeTimer, device: Device, seconds: float, *items: tuple[str, int]) -> None:
    timer.begin_step()
    device.queued_s += seconds
    for modality, size_bytes in items:
        timer.add(modality, size_bytes)
    timer.end_step()


def test_seconds_are_those_of_steps_that_the_device_has_ended(device: Device) -> None:
    timer = EncodeTimer()
    for _ in range(FEWEST):
        step(timer, device, 0.5, ("image", 600), ("image", 400))
        assert timer.estimate_s("image", 1000) == 0.0
    device.reached_s = device.queued_s
    timer.end_step()

    assert timer.estimate_s("image", 1000) == pytest.approx(0.5)
    assert timer.estimate_s("image", 512) == pytest.approx(0.256)
    assert timer.estimate_s("image", 255) == timer.estimate_s("video", 1000) == 0.0
    assert device.events == 2 * FEWEST


@pytest.mark.fault(157)
def test_the_first_encode_which_compiles_does_not_count_alone(device: Device) -> None:
    timer = EncodeTimer()
    device.reached_s = 10**6
    for seconds in (60.0, 0.1, 0.1):
        step(timer, device, seconds, ("image", 1000))
    assert timer.estimate_s("image", 1000) == pytest.approx(0.1)

    for _ in range(SAMPLES):
        step(timer, device, 0.3, ("image", 1000))
    assert timer.estimate_s("image", 1000) == pytest.approx(0.3)


def test_a_step_without_outputs_or_without_a_beginning_is_not_measured(device: Device) -> None:
    timer = EncodeTimer()
    device.reached_s = 10**6
    for _ in range(FEWEST):
        step(timer, device, 1.0)
        timer.add("image", 1000)
        timer.end_step()

    assert timer.estimate_s("image", 1000) == 0.0


def test_steps_that_wait_for_a_device_are_bounded(device: Device) -> None:
    timer = EncodeTimer()
    for number in range(PENDING + 5):
        step(timer, device, float(number), ("image", 1000))

    assert len(timer._pending) == PENDING  # noqa: SLF001


def test_a_processor_is_measured_by_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(encode_timer, "time", SimpleNamespace(perf_counter=lambda: next(clock) / 4))
    timer = EncodeTimer()
    for _ in range(FEWEST):
        timer.begin_step()
        timer.add("audio", 100)
        timer.end_step()

    assert timer.estimate_s("audio", 100) == 0.25
