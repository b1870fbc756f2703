"""About how many tokens a prompt is, without a tokenizer.

Four bytes of UTF-8 are taken for one token, which is what tokenizers of large vocabularies make of
English; token ids are counted. Code and lists of numbers are up to twice as many tokens as that,
Chinese and Japanese about a third more. Media are not in it.
"""

from typing import Any

from epd.bodies.items import MODALITY, Body

FIELDS = ("messages", "prompt", "input", "instructions", "system", "tools")
"""Where the endpoints' requests have what their prompts are made of."""

NO_TEXT = frozenset({*MODALITY, "source", "uuid", "type"})
"""Keys whose values are no text."""

BYTES_PER_TOKEN = 4


def prompt_tokens(body: Body) -> int:
    """About how many tokens the text of a request is.

    A role is counted as text, in place of what the chat template puts around a message.
    """
    text_bytes = ids = 0
    left: list[Any] = [body[field] for field in FIELDS if field in body]
    while left:
        value = left.pop()
        match value:
            case str():
                text_bytes += len(value) if value.isascii() else len(value.encode())
            case list():
                if value and type(value[0]) is int:
                    ids += len(value)
                else:
                    left += value
            case dict():
                left += (value[key] for key in value if key not in NO_TEXT)
    return ids + -(-text_bytes // BYTES_PER_TOKEN)
