"""Human-readable numbers, sparklines and bars. Pure."""

import time
from collections.abc import Sequence

BLOCKS = " ▁▂▃▄▅▆▇█"
UNITS = ("B", "kB", "MB", "GB", "TB")
KILO = 1000


def printed(text: str) -> str:
    """Return external text without control characters of terminals."""
    return "".join(one if one.isprintable() else "·" for one in text)


def seconds(value: float | None) -> str:
    """Return a duration as text, such as `1.2 s` or `85 ms`."""
    if value is None:
        return "-"
    return f"{_short(value)} s" if value >= 0.9995 else f"{_short(value * KILO)} ms"  # noqa: PLR2004


def size(value: float) -> str:
    """Return a number of bytes as text, such as `1.2 MB`."""
    unit = 0
    while value >= KILO and unit < len(UNITS) - 1:
        value, unit = value / KILO, unit + 1
    return f"{_short(value)} {UNITS[unit]}"


def rate(value: float) -> str:
    """Return a rate per second as text."""
    return _short(value) if value else "0"


def share(part: int, whole: int) -> str:
    """Return a share in percent as text; `-` if the whole is 0."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def clock(unix_s: float) -> str:
    """Return the local time of day of a Unix time."""
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def spark(values: Sequence[float]) -> str:
    """Return a sparkline: one block per value, scaled to the largest value."""
    top = max(values, default=0) or 1
    return "".join(BLOCKS[round(value / top * (len(BLOCKS) - 1))] for value in values)


def bar(part: float, width: int) -> str:
    """Return a bar for a share from 0 to 1, over `width` cells in steps of an eighth."""
    eighths = round(min(1.0, max(0.0, part)) * width * 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[rest]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"  # noqa: PLR2004
