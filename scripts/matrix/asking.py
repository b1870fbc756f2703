"""Chat requests to an engine, or through the proxy."""

import secrets
import time
from uuid import uuid4

import httpx
import orjson

from epd.tools.bench.answer import Answer, read_answer, read_events
from scripts.matrix.cases import Request, contents
from scripts.matrix.media import text

TIMEOUT_S = 120.0
"""Time limit of a request, in seconds. The first request through NIXL may take a minute."""
TOKENS = 16


def ask(client: httpx.Client, url: str, model: str, request: Request) -> Answer:
    """Request some tokens at temperature 0, under a unique salt."""
    body = {
        "model": model,
        "messages": list(request.messages),
        "max_tokens": TOKENS,
        "temperature": 0,
        "logprobs": True,
        "cache_salt": secrets.token_hex(8),
        **request.options,
    }
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    started = time.monotonic()
    try:
        reply = client.post(f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT_S)
    except httpx.HTTPError as error:
        return Answer(0, error=repr(error), seconds=time.monotonic() - started)
    seconds = time.monotonic() - started
    items = reply.headers.get("x-epd-items", "")
    if reply.status_code != httpx.codes.OK:
        return Answer(reply.status_code, error=message(reply), items=items, seconds=seconds)
    events = list(read_events(reply.content)) if request.stream else [orjson.loads(reply.content)]
    return read_answer(events, items, seconds)


def alone(client: httpx.Client, url: str, model: str, request: Request) -> Answer:
    """Send a request to an engine directly, with new names for its media."""
    return ask(client, url, model, named(request))


def apart(client: httpx.Client, url: str, model: str, request: Request) -> Answer:
    """Send a request to an engine directly, after it has encoded each item in a separate request.

    An encode instance gets one item at a time, while an engine gets all items of a request
    together. The encoder output of an item may depend on the other items.
    """
    whole = named(request)
    for item in whole.media:
        ask(client, url, model, Request([{"role": "user", "content": [item, text()]}]))
    return ask(client, url, model, whole)


def named(request: Request) -> Request:
    """Return the request with a new name for each item."""
    messages = [
        {
            **turn,
            "content": [
                part if part["type"] == "text" else {**part, "uuid": uuid4().hex}
                for part in contents(turn)
            ],
        }
        for turn in request.messages
    ]
    return Request(messages, stream=request.stream, options=request.options)


def message(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError):
        return reply.text[:200]
