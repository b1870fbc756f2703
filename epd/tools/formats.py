"""Figures as people read them, and what the commands for operators read from the environment."""

import os
from argparse import ArgumentTypeError
from urllib.parse import urlsplit

UNITS = ("B", "kB", "MB", "GB", "TB")
KILO = 1000

ADMIN_KEYS = ("EPD_ADMIN_API_KEY", "ADMIN_API_KEY")
"""Environment variables with the admin key, the same as for `epd serve`."""


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


def admin_key() -> str | None:
    """Return the operator's key from the environment; None without one."""
    return next(filter(None, map(os.environ.get, ADMIN_KEYS)), None)


def http_url(text: str) -> str:
    """Return a URL from the command line, without a slash at its end.

    Raises:
        ArgumentTypeError: it is no http(s) URL.
    """
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ArgumentTypeError(f"{text!r} is not an http(s) URL")
    return text.rstrip("/")
