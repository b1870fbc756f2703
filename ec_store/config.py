"""Parsers of the parameters in a store URL."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
UNITS |= {unit[:-1]: UNITS[unit] for unit in ("kib", "mib", "gib", "tib")}  # of Kubernetes
UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
SIZES = ("B", "KiB", "MiB", "GiB", "TiB")
STEP = 1024
ALL_MODE_BITS = 0o7777
SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?) ?([a-z]*)")


def parameters(
    url: str, parsers: Mapping[str, Any], fields: Mapping[str, str] = {}
) -> dict[str, Any]:
    """Parse the query of a store URL, each parameter with its function in `parsers`.

    Returns:
        The values by the names of the parameters, or by those that `fields` has for them.

    Raises:
        ValueError: a parameter is unknown, given twice, or rejected by its function.
    """
    found: dict[str, Any] = {}
    for name, value in parse_qsl(urlsplit(url).query, keep_blank_values=True):
        if name not in parsers:
            raise ValueError(f"unknown parameter {name!r}; known: {', '.join(sorted(parsers))}")
        field = fields.get(name, name)
        if field in found:
            raise ValueError(f"parameter {name!r} is given twice")
        try:
            found[field] = parsers[name](value)
        except ValueError as error:
            raise ValueError(f"parameter {name!r}: {error}") from None
    return found


def size_bytes(text: str) -> int:
    """Parse a size such as `64GiB`, `64Gi` or `500MB` into bytes."""
    return int(_quantity(text, UNITS, "a size such as 64GiB"))


def duration_s(text: str) -> float:
    """Parse a duration such as `7d`, `90s` or `20ms` into seconds."""
    return _quantity(text, SECONDS, "a duration such as 7d or 90s")


def octal(text: str) -> int:
    """Parse permissions such as `2770`."""
    mode = int(text, 8)
    if not 0 <= mode <= ALL_MODE_BITS:
        raise ValueError(f"{text!r} is not a mode such as 0750")
    return mode


def size_text(size: float) -> str:
    """Format a size in bytes for display, such as `64.0 GiB`."""
    for unit in SIZES[:-1]:
        if size < STEP:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= STEP
    return f"{size:.1f} {SIZES[-1]}"


def _quantity(text: str, units: Mapping[str, float], what: str) -> float:
    match = _QUANTITY.fullmatch(text.strip().lower())
    if match is None or match[2] not in units:
        raise ValueError(f"{text!r} is not {what}")
    return float(match[1]) * units[match[2]]


def shared_name(url: str) -> str:
    """Return a digest of the URL of a store that hosts share, the same on each: no secret.

    The user, the password and the parameters may differ; a store of another spelling is another.
    """
    parts = urlsplit(redacted(url))
    place = f"{parts.scheme}://{parts.netloc.removeprefix('***@')}{parts.path.rstrip('/')}"
    prefix = parse_qsl(parts.query)
    named = [value for name, value in prefix if name == "prefix"]
    return hashlib.sha256(repr((place, named)).encode()).hexdigest()[:16]


def redacted(url: str) -> str:
    """Return the URL without its user and password, for messages."""
    return re.sub(r"//.*@", "//***@", url)  # to the last @: a password may contain one
