"""Figures as people read them, and lines of blocks. Pure."""

import time
from collections.abc import Sequence

BLOCKS = " ▁▂▃▄▅▆▇█"
UNITS = ("B", "kB", "MB", "GB", "TB")
KILO = 1000


def printed(text: str) -> str:
    """What came from outside, without what a terminal would obey."""
    return "".join(one if one.isprintable() else "·" for one in text)


def seconds(value: float | None) -> str:
    """A duration, such as `1.2 s` or `85 ms`."""
    if value is None:
        return "-"
    return f"{_short(value)} s" if value >= 0.9995 else f"{_short(value * KILO)} ms"  # noqa: PLR2004


def size(value: float) -> str:
    """A number of bytes."""
    unit = 0
    while value >= KILO and unit < len(UNITS) - 1:
        value, unit = value / KILO, unit + 1
    return f"{_short(value)} {UNITS[unit]}"


def rate(value: float) -> str:
    """How often a second."""
    return _short(value) if value else "0"


def share(part: int, whole: int) -> str:
    """A part, in percent."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def clock(unix_s: float) -> str:
    """A time of day."""
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def spark(values: Sequence[float]) -> str:
    """A line of blocks, as high as the values are beside the highest."""
    top = max(values, default=0) or 1
    return "".join(BLOCKS[round(value / top * (len(BLOCKS) - 1))] for value in values)


def bar(part: float, width: int) -> str:
    """A bar of this share of so many cells, in eighths."""
    eighths = round(min(1.0, max(0.0, part)) * width * 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[rest]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"  # noqa: PLR2004
