"""Estimate of the length of a request's prompt. Pure.

It needs no tokenizer. Four bytes of UTF-8 count as one token, as with English text and tokenizers
of large vocabularies; token ids are counted. Code and lists of numbers have up to twice as many
tokens, Chinese and Japanese about a third more. Media do not count.
"""

from typing import Any

from epd.api.items import MODALITY, Body

FIELDS = ("messages", "prompt", "input", "instructions", "system", "tools")
"""Fields with the prompt, in the requests of all endpoints."""

NO_TEXT = frozenset({*MODALITY, "source", "uuid", "type"})
"""Keys with values that are not text."""

BYTES_PER_TOKEN = 4


def prompt_tokens(body: Body) -> int:
    """Return the estimated number of tokens in the text of a request.

    A role counts as text, in place of the chat template's text around a message.
    """
    text_bytes = ids = 0
    pending: list[Any] = [body[field] for field in FIELDS if field in body]
    while pending:
        value = pending.pop()
        match value:
            case str():
                text_bytes += len(value) if value.isascii() else len(value.encode())
            case list():
                if value and type(value[0]) is int:
                    ids += len(value)
                else:
                    pending += value
            case dict():
                pending += (value[key] for key in value if key not in NO_TEXT)
    return ids + -(-text_bytes // BYTES_PER_TOKEN)
