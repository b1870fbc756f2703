"""Figures as people read them, in the state, in `epd top` and in the report of `epd observe`."""

UNITS = ("B", "kB", "MB", "GB", "TB")
KILO = 1000


def figures(value: float) -> str:
    """Return a number with about three figures."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"  # noqa: PLR2004


def seconds_text(value: float | None) -> str:
    """Return a duration as text, such as `1.2 s` or `85 ms`."""
    if value is None:
        return "-"
    return f"{figures(value)} s" if value >= 0.9995 else f"{figures(value * KILO)} ms"  # noqa: PLR2004


def bytes_text(value: float) -> str:
    """Return a number of bytes as text, such as `1.2 MB`."""
    unit = 0
    while value >= KILO and unit < len(UNITS) - 1:
        value, unit = value / KILO, unit + 1
    return f"{figures(value) if unit else round(value)} {UNITS[unit]}"


def rate_text(value: float) -> str:
    """Return a rate per second as text."""
    return figures(value) if value else "0"


def share_text(part: int, whole: int) -> str:
    """Return a share in percent as text; `-` if the whole is 0."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def plural(number: int, noun: str) -> str:
    """Return a number with a noun that takes an s, such as `2 encodes`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
