"""Encode seconds of items, by the time that the encodes of earlier steps took on the device."""

import statistics
import time
from collections import deque
from typing import NamedTuple, TypeAlias

import torch

SAMPLES = 9
"""Last steps of one modality and size: their median ignores a first compile, or a busy GPU."""

FEWEST = 3
"""Steps before which nothing is known."""

PENDING = 16
"""Upper bound of the steps that the device has not ended."""

Mark: TypeAlias = torch.Event | float
"""Point of the work on the device; on a CPU, time in seconds."""


class _Step(NamedTuple):
    """Encodes of one step.

    Attributes:
        items: modality and bytes of each item.
    """

    began: Mark
    ended: Mark
    items: list[tuple[str, int]]


class EncodeTimer:
    """Timer of the encodes of a worker's steps.

    The device notes the time of two events for each step with encodes. They are read in a later
    step, when they have passed: no step waits. Used by one thread.
    """

    def __init__(self) -> None:
        self._began: Mark | None = None
        self._items: list[tuple[str, int]] = []
        self._pending: deque[_Step] = deque(maxlen=PENDING)
        self._rates: dict[tuple[str, int], deque[float]] = {}

    def begin_step(self) -> None:
        """Begin to measure, before a step encodes.

        Raises:
            RuntimeError: the device failed.
        """
        self._items = []
        self._began = _mark()

    def add(self, modality: str, size_bytes: int) -> None:
        """Note an output that the step has encoded."""
        self._items.append((modality, size_bytes))

    def end_step(self) -> None:
        """End the measurement of a step, if it began; errors are those of `begin_step`."""
        began, self._began = self._began, None
        if began is not None and self._items:
            self._pending.append(_Step(began, _mark(), self._items))
        self._items = []
        while self._pending and _has_passed(self._pending[0].ended):
            self._learn(self._pending.popleft())

    def estimate_s(self, modality: str, size_bytes: int) -> float:
        """Return the seconds of an encode with an output of this size; 0 if they are unknown."""
        rates = self._rates.get((modality, size_bytes.bit_length()), ())
        return statistics.median(rates) * size_bytes if len(rates) >= FEWEST else 0.0

    def _learn(self, step: _Step) -> None:
        rate = _seconds_between(step.began, step.ended) / max(1, sum(n for _, n in step.items))
        for modality, size_class in {(name, n.bit_length()) for name, n in step.items}:
            rates = self._rates.setdefault((modality, size_class), deque(maxlen=SAMPLES))
            rates.append(rate)


def _mark() -> Mark:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream())
    return event


def _has_passed(mark: Mark) -> bool:
    return isinstance(mark, float) or bool(mark.query())


def _seconds_between(began: Mark, ended: Mark) -> float:
    if isinstance(began, float) or isinstance(ended, float):
        return ended - began
    return float(began.elapsed_time(ended)) / 1000
