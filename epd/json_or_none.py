"""JSON that may be invalid."""

from typing import Any

import orjson


def json_or_none(text: bytes | str) -> Any:
    """Return the parsed value; None for invalid JSON, as for `null`."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
