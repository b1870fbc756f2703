"""Parsing of an instance's error: its message for the client, and its `Retry-After`. Pure."""

import re
from collections.abc import Mapping
from typing import Any

from epd.json_or_none import json_or_none

RETRY_AFTER = re.compile(r"[0-9]{1,6}")
"""`Retry-After` in seconds. The other form, a date, is ignored."""

MAX_UPSTREAM_TEXT = 500
"""Maximum length of an upstream's non-JSON error text in the client's answer, in characters."""

INSIDES = re.compile(r"0x[0-9a-fA-F]{6,}|(?:/[\w.~-]+){2,}")
"""Memory addresses and file paths. vLLM removes them from its own errors, but an error in another
shape may come from other software."""


def said_retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds for which an instance asks for no further request; None without them."""
    said = headers.get("Retry-After", "")
    return float(said) if RETRY_AFTER.fullmatch(said) else None


def openai_error(reply: bytes) -> dict[str, Any] | None:
    """Return the `error` object of an answer in the OpenAI shape; None for another shape."""
    match json_or_none(reply):
        case {"error": {"message": str()} as error}:
            return dict(error)
        case _:
            return None


def plain_message(status: int, reply: bytes) -> str:
    """Return the message of an answer in another shape, without addresses and paths of the host."""
    match json_or_none(reply):
        # Errors of FastAPI, and vLLM's answer to a wrong API key.
        case {"detail": str() as message} | {"error": str() as message} if message:
            text = message
        case _:
            text = reply[:MAX_UPSTREAM_TEXT].decode("utf-8", "replace").strip()
    return INSIDES.sub("…", text) or f"the instance answered {status}"
