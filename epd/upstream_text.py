"""What an instance's error says to the client, and of when to ask again. Pure."""

import re
from collections.abc import Mapping
from typing import Any

import orjson

RETRY_AFTER = re.compile(r"[0-9]{1,6}")
"""Seconds; the other form, a date, is for browsers."""

MAX_UPSTREAM_TEXT = 500
"""Characters of an upstream's non-JSON error text that are shown to a client."""

INSIDES = re.compile(r"0x[0-9a-fA-F]{6,}|(?:/[\w.~-]+){2,}")
"""Addresses and paths. vLLM strips them from its own errors; another shape is another's error."""


def said_retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return for how many seconds an instance asks to get no request; None: it does not say."""
    said = headers.get("Retry-After", "")
    return float(said) if RETRY_AFTER.fullmatch(said) else None


def openai_error(reply: bytes) -> dict[str, Any] | None:
    """Return the `error` object of an answer in OpenAI's shape; None for any other."""
    match _parsed(reply):
        case {"error": {"message": str()} as error}:
            return dict(error)
        case _:
            return None


def plain_message(status: int, reply: bytes) -> str:
    """Return a message for the client of an answer in another shape, without the host's insides."""
    match _parsed(reply):
        # FastAPI's own errors, and vLLM's answer to a wrong API key.
        case {"detail": str() as message} | {"error": str() as message} if message:
            text = message
        case _:
            text = reply[:MAX_UPSTREAM_TEXT].decode("utf-8", "replace").strip()
    return INSIDES.sub("…", text) or f"the instance answered {status}"


def _parsed(reply: bytes) -> Any:
    try:
        return orjson.loads(reply)
    except orjson.JSONDecodeError:
        return None
