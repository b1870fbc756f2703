"""Wait for what another thread or process does."""

import time
from collections.abc import Callable

WITHIN_S = 120.0


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
