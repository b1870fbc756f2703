"""Daemon threads beside an engine's steps."""

import logging
import threading
from collections.abc import Callable

import torch

logger = logging.getLogger("vllm.ec_store")

PERIOD_S = 0.5
"""Seconds between two calls."""

CLOSE_S = 2.0


def start_thread(run: Callable[[], object], name: str, *, device: bool = False) -> threading.Thread:
    """Start a daemon thread.

    Args:
        run: function that the thread calls.
        name: name of the thread.
        device: whether it uses the device of this thread. The scheduler must use none: that
            would create a context, some 0.4 GB of a rank's memory.

    Raises:
        RuntimeError: the thread cannot be started.
    """
    index: int | None = None
    if device and torch.accelerator.current_accelerator(check_available=True):
        index = torch.accelerator.current_device_index()

    def work() -> None:
        if index is not None:
            torch.accelerator.set_device_index(index)
        run()

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


class PeriodicThread:
    """Thread that repeats a call every `PERIOD_S` seconds, and at once while it returns True."""

    def __init__(self, call: Callable[[], bool]) -> None:
        self._call = call
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._logged = False

    def start(self, *, device: bool = False) -> None:
        """Start the thread as `start_thread`, unless it was started before."""
        if self._thread is None and not self._closed.is_set():
            self._thread = start_thread(self._run, "ec-host", device=device)

    def close(self) -> None:
        """End the thread after its present call, for which this waits `CLOSE_S` seconds at most."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._closed.is_set():
            again = False
            try:
                again = self._call()
            except Exception:
                if not self._logged:
                    self._logged = True
                    logger.exception("the thread of the host's memory failed; it goes on")
            if not again:
                self._closed.wait(PERIOD_S)
