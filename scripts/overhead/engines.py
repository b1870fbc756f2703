"""Fake engines, which answer any request at once in vLLM's format.

They run as a separate process: `python -m scripts.overhead.engines encode:8001 decode:8002`.
"""

import argparse
import asyncio
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import cast

import orjson
import uvloop

from ec_store.base import Store
from ec_store.entry import Entry
from ec_store.keys import EntryKey
from ec_store.opening import open_store
from scripts.overhead import load
from scripts.overhead.scenarios import GAP, MODEL

NAMESPACE = f"{MODEL}@main:0"
GRID = {"image_grid_thw": [1, 72, 72]}
ENTRY_BYTES = 4096
UUID = re.compile(rb'"uuid":\s*"([^"]+)"')
MAX_TOKENS = re.compile(rb'"max_tokens":\s*(\d+)')
STREAM = re.compile(rb'"stream":\s*true')
GAP_MS = re.compile(rb'"%b":\s*([\d.]+)' % GAP.encode())
TAIL = 4096
"""Bytes at either end of a body that are searched for short fields."""

HEAD = {"id": "chatcmpl-measured", "created": 1, "model": MODEL}
EVENT = {
    **HEAD,
    "object": "chat.completion.chunk",
    "choices": [{"index": 0, "delta": {"content": " token"}, "logprobs": None}],
}
MESSAGE = {"role": "assistant", "content": "It is a picture of noise."}
ANSWER = {
    **HEAD,
    "object": "chat.completion",
    "choices": [{"index": 0, "message": MESSAGE, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1300, "total_tokens": 1308, "completion_tokens": 8},
}
KV = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "measured",
    "remote_block_ids": [list(range(80))],
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}
OK = "HTTP/1.1 200 OK"
ONE_CHUNK = load.chunk(b"data: " + orjson.dumps(EVENT) + b"\n\n")
LAST_CHUNKS = load.chunk(b"data: [DONE]\n\n") + load.LAST_CHUNK

Answer = Callable[["EngineConnection", bytearray], None]


class EngineConnection(asyncio.Protocol):
    """Connection of a proxy to a fake engine."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._request = load.Message()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._request.feed(data)
        if not self._request.complete:
            return
        request, self._request = self._request, load.Message()
        if request.head.startswith(b"post"):
            self._answer(self, request.body)
        else:
            self.json({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    def json(self, document: object) -> None:
        body = orjson.dumps(document)
        self._transport.write(load.head(OK, body) + body)

    def stream(self, chunks: int, gap_s: float) -> None:
        """Answer with a number of events, each written separately, `gap_s` seconds apart."""
        self._transport.write(load.head(OK, None, "text/event-stream; charset=utf-8"))
        self._next(chunks, gap_s, self._loop.time())

    def _next(self, chunks: int, gap_s: float, due_s: float) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(ONE_CHUNK)
        if chunks == 1:
            self._transport.write(LAST_CHUNKS)
        elif gap_s:
            self._loop.call_at(due_s + gap_s, self._next, chunks - 1, gap_s, due_s + gap_s)
        else:
            self._loop.call_soon(self._next, chunks - 1, gap_s, due_s)


def encode(store: Store | None, to: EngineConnection, body: bytearray) -> None:
    """Write a store entry for each item, and answer with `ec_transfer_params`."""
    uuids = [found.decode() for found in UUID.findall(body)]
    for uuid in uuids:
        output = memoryview(bytes(ENTRY_BYTES))
        entry = Entry(output, "BF16", (16, ENTRY_BYTES // 32), "image", GRID)
        if store is not None:
            store.put(EntryKey(NAMESPACE, uuid), entry)
    item = {"modality": "image", "metadata": GRID, "namespace": NAMESPACE}
    reply = {uuid: {**item, "item_indices": [index]} for index, uuid in enumerate(uuids)}
    to.json({**ANSWER, "ec_transfer_params": reply})


def prefill(to: EngineConnection, _: bytearray) -> None:
    to.json({**ANSWER, "kv_transfer_params": KV})


def decode(to: EngineConnection, body: bytearray) -> None:
    """Answer with a document or a stream; the request sets the number and the gap of the events."""
    fields = body if len(body) < 2 * TAIL else body[:TAIL] + body[-TAIL:]
    if not STREAM.search(fields):
        to.json(ANSWER)
        return
    chunks, gap_ms = MAX_TOKENS.search(fields), GAP_MS.search(fields)
    to.stream(int(chunks[1]) if chunks else 1, float(gap_ms[1]) / 1000 if gap_ms else 0.0)


async def serve(roles: list[tuple[str, int]], store: Store | None) -> None:
    """Serve these roles and ports until the process is stopped."""
    answers: dict[str, Answer] = {
        "encode": partial(encode, store),
        "prefill": prefill,
        "decode": decode,
    }
    loop = asyncio.get_running_loop()
    for role, port in roles:
        connection = partial(EngineConnection, answers[role])
        await loop.create_server(connection, "127.0.0.1", port, backlog=2048)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("instances", nargs="+", metavar="ROLE:PORT")
    parser.add_argument("--ec-store", metavar="URL", help="store for encoder outputs")
    args = parser.parse_args()
    words = (word.partition(":") for word in args.instances)
    roles = [(role, int(port)) for role, _, port in words]
    with ExitStack() as stack:
        store = stack.enter_context(open_store(args.ec_store)) if args.ec_store else None
        if store is not None:
            store.register_namespace(MODEL, NAMESPACE)
        uvloop.run(serve(roles, store))


if __name__ == "__main__":
    os.umask(0o077)
    main()
