"""Lag of the event loop.

The loop serves all requests: a callback that holds it for 100 ms delays each running stream by
100 ms.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

import structlog

from epd.aio import Background

TICK_S = 0.05
"""Interval of the lag measurement, in seconds. Shorter delays may be missed. Each tick wakes the
process: with 0.02, that was half of the CPU of an idle proxy, 5 ms a second."""

WINDOW_S = 15.0
"""Window of the reported maximum, in seconds: about one scrape interval of Prometheus."""

ALARM_S = 0.1
"""Lag that is logged, once per window, in seconds."""


def watched(
    tell: Callable[[float], None], background: Background, window_s: float = WINDOW_S
) -> AbstractAsyncContextManager[None]:
    """Watch the running loop until the context is left.

    `tell` is called with the longest lag of each window, in seconds.
    """
    return background.run_task("loop_lag", partial(_watch, tell, window_s))


async def _watch(tell: Callable[[float], None], window_s: float) -> None:
    clock = asyncio.get_running_loop().time
    while True:
        began_s = last_s = clock()
        longest_s = 0.0
        while last_s - began_s < window_s:
            await asyncio.sleep(TICK_S)
            now_s = clock()
            longest_s, last_s = max(longest_s, now_s - last_s - TICK_S), now_s
        tell(longest_s)
        if longest_s > ALARM_S:
            log = structlog.get_logger("epd")
            log.warning("the event loop was held up", seconds=round(longest_s, 3))
