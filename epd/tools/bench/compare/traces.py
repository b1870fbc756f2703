"""Workloads as AIPerf's JSONL, a request in each line.

`trace_lines` writes the type `mooncake_trace` with OpenAI's messages
(https://docs.nvidia.com/aiperf/benchmark-modes/trace-replay-with-mooncake-traces): lines of one
`session_id` are turns. `read_trace` also reads `single_turn` with texts and pictures
(https://docs.nvidia.com/aiperf/tutorials/datasets-inputs/custom-dataset-guide), as Dynamo's
benchmarks of embedding caches have it. Requests are sent as soon as a client is free: `timestamp`
and `delay` are not used.
"""

import base64
import mimetypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from epd.tools.bench.compare.workloads import Question, Workload

TOKENS = 128
"""Length of an answer of which the trace has none."""


class TraceInvalid(ValueError):
    """Error of a line that is no request. The message has its number and the reason."""


def trace_lines(workload: Workload) -> Iterator[bytes]:
    """Yield a line for each request of a workload, in the order of its conversations."""
    for number, conversation in enumerate(workload.conversations):
        for question in conversation:
            line = {
                "session_id": f"{workload.name}-{number}",
                "messages": question.messages,
                "output_length": question.tokens,
            }
            yield orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def read_trace(name: str, lines: Iterable[bytes], folder: Path, at_once: int) -> Workload:
    """Return a workload from the lines of a trace.

    Args:
        name: name of the workload.
        lines: lines of the file; empty ones are skipped.
        folder: folder to which paths of pictures are relative.
        at_once: number of clients.

    Raises:
        TraceInvalid: a line is no request, or there is none.
        OSError: a picture cannot be read.
    """
    sessions: dict[str | int, list[Question]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = orjson.loads(line)
            question = Question("", _messages(fields, folder), _tokens(fields))
            session = _session(fields, number)
        except ValueError as error:
            raise TraceInvalid(f"line {number}: {error}") from None
        sessions.setdefault(session, []).append(question)
    if not sessions:
        raise TraceInvalid("it has no requests")
    return Workload(name, at_once, [*sessions.values()])


def _messages(fields: Any, folder: Path) -> Sequence[Mapping[str, Any]]:
    match fields:
        case {"messages": [*messages]} if messages and all(map(_is_message, messages)):
            return messages
        case {"text_input": str() as text}:
            return [{"role": "user", "content": text}]
        case {"messages": _} | {"text_input": _}:
            raise ValueError("messages is no list of objects with a role, or text_input no text")
        case {"turns": _}:
            raise ValueError("multi_turn has no answers of earlier turns: arms would differ")
        case {"input_length": _}:
            raise ValueError("input_length alone has no content to send")
        case dict():
            texts, images = (_strings(fields, name) for name in ("text", "image"))
            if texts or images:
                parts = [{"type": "text", "text": text} for text in texts]
                pictures = [_picture(image, folder) for image in images]
                return [{"role": fields.get("role") or "user", "content": [*parts, *pictures]}]
    raise ValueError("it has neither messages nor a text or a picture")


def _session(fields: Mapping[str, Any], number: int) -> str | int:
    """Return the session of a line; the line's number, which is no text, if it names none."""
    match fields.get("session_id"):
        case None:
            return number
        case str() as session:
            return session
    raise ValueError("session_id is no text")


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _strings(fields: Mapping[str, Any], name: str) -> Sequence[str]:
    """Return the texts of a field and of its plural."""
    value, values = fields.get(name), fields.get(f"{name}s")
    found = [*([] if value is None else [value]), *(values if isinstance(values, list) else [])]
    if not isinstance(values, list | None) or not all(isinstance(text, str) for text in found):
        raise ValueError(f"{name} and {name}s must be text, not named fields")
    return found


def _picture(source: str, folder: Path) -> Mapping[str, Any]:
    """Return the part of a picture: URLs stay as they are, files become data URLs."""
    if not source.startswith(("data:", "http:", "https:")):
        kind = mimetypes.guess_type(source)[0] or "image/jpeg"
        content = base64.b64encode((folder / source).read_bytes()).decode()
        source = f"data:{kind};base64,{content}"
    return {"type": "image_url", "image_url": {"url": source}}


def _tokens(fields: Mapping[str, Any]) -> int:
    tokens = fields.get("output_length") or TOKENS
    if type(tokens) is not int or tokens < 1:
        raise ValueError(f"output_length {tokens!r} is no positive number")
    return tokens
