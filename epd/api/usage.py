"""Usage of the prefix cache in answers: prefill's report takes the place of decode's. Pure.

Decode computes no prompt that prefill has computed, so it reports that it wrote none of it to its
prefix cache. vLLM reports the number of cached tokens of prefill itself, in `kv_transfer_params`.

The fields are found by name, and nothing else is parsed. A model's text cannot imitate them,
because quotation marks in a JSON string are escaped.
"""

import re
from collections.abc import Mapping

Usage = Mapping[bytes, bytes]
"""Numbers of a usage object by field."""

_NAME = b'"usage"'
_OBJECT = re.compile(_NAME + rb"\s*:\s*\{(?:[^{}]|\{[^{}]*\})*\}")
_WRITTEN = (b"created_cache_tokens", b"cache_write_tokens", b"cache_creation_input_tokens")
"""Fields with the tokens that were written to the prefix cache: of chat completions, responses and
messages."""
_REST = b"input_tokens"
"""Field of messages with the tokens that were neither read from the prefix cache nor written."""
_NUMBER = re.compile(rb'"(%b)"\s*:\s*(\d+)' % b"|".join((*_WRITTEN, _REST)))


def prefill_usage(reply: bytes) -> Usage:
    """Return the numbers in prefill's reply that replace those of decode; empty for none."""
    found = _OBJECT.match(reply, max(0, reply.rfind(_NAME)))
    numbers = dict(_NUMBER.findall(found[0])) if found else {}
    written = {name: numbers[name] for name in _WRITTEN if int(numbers.get(name, 0))}
    if _WRITTEN[-1] in written and _REST in numbers:
        written[_REST] = numbers[_REST]
    return written


def with_usage(answer: bytes, usage: Usage, start: int = 0) -> bytes:
    """Return an answer, or events of a stream, with these numbers from `start` on.

    Objects without numbers of the prefix cache, such as in the first event of messages, have all
    tokens of the prompt in `input_tokens`, and stay unchanged.
    """
    if not usage or answer.find(_NAME, start) < 0:
        return answer

    def number(found: re.Match[bytes]) -> bytes:
        before = found[0][: found.start(2) - found.start()]
        return before + usage.get(found[1], found[2])

    def numbers(found: re.Match[bytes]) -> bytes:
        counts = any(name in found[0] for name in _WRITTEN)
        return _NUMBER.sub(number, found[0]) if counts else found[0]

    return answer[:start] + _OBJECT.sub(numbers, answer[start:])


def whole_with_usage(answer: bytes, usage: Usage) -> bytes:
    """Return a complete answer with these numbers in its last usage object.

    Objects before it may be arguments of a tool that the model has written.
    """
    return with_usage(answer, usage, max(0, answer.rfind(_NAME))) if usage else answer
