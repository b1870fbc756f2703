"""How long the event loop keeps others waiting.

One loop serves everybody: what holds it up for 100 ms does so for each running stream.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

import structlog

from epd.background import Background

TICK_S = 0.02
"""How often it is looked. What holds the loop up for less is not always seen."""

WINDOW_S = 15.0
"""What is told is the worst of this long: about as often as Prometheus asks."""

ALARM_S = 0.1
"""A lag that is logged, once in a window."""


def watched(
    tell: Callable[[float], None], background: Background, window_s: float = WINDOW_S
) -> AbstractAsyncContextManager[None]:
    """Watch the running loop until the context is left.

    Args:
        tell: is told the longest lag of each window, in seconds.
        background: runs it.
        window_s: how long a window is.
    """
    return background.running("loop_lag", partial(_watch, tell, window_s))


async def _watch(tell: Callable[[float], None], window_s: float) -> None:
    while True:
        lag_s = await _worst(window_s)
        tell(lag_s)
        if lag_s > ALARM_S:
            structlog.get_logger("epd").warning(
                "the event loop was held up", seconds=round(lag_s, 3)
            )


async def _worst(window_s: float) -> float:
    clock = asyncio.get_running_loop().time
    began = last = clock()
    worst = 0.0
    while last - began < window_s:
        await asyncio.sleep(TICK_S)
        now = clock()
        worst = max(worst, now - last - TICK_S)
        last = now
    return worst
