"""What the errors of a vLLM engine say about their cause. Pure.

vLLM answers 500 to a request whose media it cannot fetch, with the words of the library that failed
(`vllm/multimodal/media/connector.py`, `_wrap_media_fetch_error`, which turns only the origin's 4xx
into 422). What fails inside the engine has one of a few messages instead.
"""

from epd.json_or_none import json_or_none

ENGINE_DIED = b"EngineCore encountered an issue"
"""In every answer of a vLLM server whose engine died (`vllm/v1/engine/exceptions.py`,
`EngineDeadError`). The server ends a moment later."""

FAILED_INSIDE = "internal server error"
"""Message of a request that failed inside the engine (`vllm/exceptions.py`, `GenerationError`), and
of a bug in the HTTP server; in any case."""


def engine_died(reply: bytes) -> bool:
    """Return whether an error says that the engine behind a server is dead."""
    return ENGINE_DIED in reply


def may_be_fetch(reply: bytes) -> bool:
    """Return whether a 500 may mean that the engine could not fetch a request's media.

    That holds for every error in vLLM's shape that is not the engine's own: the words of HTTP
    clients are too many to list, and change.
    """
    match json_or_none(reply):
        case {"error": {"message": str() as message}}:
            return FAILED_INSIDE not in message.lower() and not engine_died(reply)
        case _:
            return False
