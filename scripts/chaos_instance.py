"""Fake vLLM server for `chaos.py`, in a separate process that can be killed, stopped or broken.

    python -m scripts.chaos_instance --role decode --port 9001 --store file:///tmp/store

A response is derived from the request: from its text, and from the content of each picture. A
consumer gets a picture from the request or, by its key, from the store, where encode instances
write it. Prefill keeps its result for a prompt until decode fetches it, once. So a wrong picture, a
lost entry or the KV cache of another request gives another response.

`POST /fault` with a name sets a fault until the next call; `GET /state` reports open requests.
"""

import argparse
import asyncio
import base64
import hashlib
import random
import uuid
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import aiohttp
import orjson
import uvloop
from aiohttp import web

from ec_store import Entry, EntryKey, StoreError
from ec_store.aio import AsyncStore
from ec_store.opening import open_async_store
from epd.routing.instances import Role
from scripts.chaos_answers import EARLY, LATE, Answer, deliver, error

MODEL, NAMESPACE = "m", "chaos@main:0"
COPIES = 64
"""Repetitions of the picture's digest in an entry, which then has 2 kB."""

WRITTEN_WITHIN_S = 2.0
"""Time for which a consumer waits for a promised entry, in seconds."""

LEAVE_ALONE_S = 1.0
"""Time without promises after a failed write, in seconds, as in the connector."""

KV_FAULTS = {"hang", "reset"}
"""Faults that also affect fetches from a prefill instance."""

MAX_FILLER = 1000
FILLER = "x" * 1024
"""Additional word of a response, for requests with `max_tokens`."""

Body = Mapping[str, Any]
T = TypeVar("T")


class Unservable(Exception):
    """Error that vLLM answers with a 500 without details."""


def answer_of(text: str, pictures: Iterable[bytes]) -> str:
    """Return decode's response to a text and the SHA-256 of pictures."""
    words = [hashlib.sha256(text.encode()).digest(), *pictures]
    return " ".join(word.hex()[:16] for word in words)


class Instance:
    """Fake server of one role, with a store and at most one fault."""

    def __init__(self, role: Role, port: int, store: str, stage_s: float, token_s: float) -> None:
        """Prepare the server without listening."""
        self._role, self._port, self._url = role, port, store
        self._stage_s, self._token_s = stage_s, token_s
        self._store: AsyncStore | None = None
        self._alone_until_s = 0.0
        self._fault = ""
        self._open = self._asked = 0
        self._kept: dict[str, str] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**28)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/kv/{id}", self._fetched),
                web.post("/fault", self._set_fault),
                web.get("/state", self._state),
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
            ]
        )
        return app

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self._open += 1
        self._asked += 1
        try:
            early = EARLY.get(self._fault)
            if early is not None:
                return await early(request)
            answer = await self._answer(orjson.loads(await request.read()))
            return await LATE.get(self._fault, deliver)(request, answer)
        except Unservable as failure:
            return error(500, str(failure))
        finally:
            self._open -= 1

    async def _answer(self, body: Body) -> Answer:
        match self._role:
            case Role.ENCODE:
                return await self._encode(body)
            case Role.PREFILL:
                return await self._prefill(body)
            case Role.DECODE:
                return await self._decoded(body, await self._fetch(body))
            case Role.PREFILL_DECODE:
                await asyncio.sleep(self._stage_s)
                return await self._decoded(body, await self._compute(body))

    async def _encode(self, body: Body) -> Answer:
        """Answer, and write the entry a little later, as the connector does."""
        await asyncio.sleep(self._stage_s)
        [part] = body["messages"][0]["content"]
        digest = _digest(part)
        key = EntryKey(NAMESPACE, part.get("uuid") or digest.hex())
        if asyncio.get_running_loop().time() < self._alone_until_s:
            return _json({"choices": []})
        self._later(self._write(key, digest))
        reply_params = {"item_indices": [0], "metadata": _grid(digest), "namespace": NAMESPACE}
        return _json({"choices": [], "ec_transfer_params": {key.identifier: reply_params}})

    async def _write(self, key: EntryKey, digest: bytes) -> None:
        await asyncio.sleep(random.uniform(0, self._stage_s))  # noqa: S311 - no secret
        data = memoryview(digest * COPIES)
        entry = Entry(data, "F32", (COPIES, len(digest) // 4), "image", _grid(digest))
        try:
            store = await self._opened()
            if self._role is Role.ENCODE:
                await store.register_namespace(MODEL, NAMESPACE)
            await store.put(key, entry)
        except StoreError:
            self._alone_until_s = asyncio.get_running_loop().time() + LEAVE_ALONE_S

    async def _opened(self) -> AsyncStore:
        if self._store is None:
            self._store = await open_async_store(self._url)
        return self._store

    async def _compute(self, body: Body) -> str:
        """Return the response to a request, with pictures from the request or the store."""
        promised = body.get("ec_transfer_params") or {}
        pictures = [
            await self._load(part, promised=part["uuid"] in promised)
            if part["type"] == "image_embeds"
            else _digest(part)
            for part in _parts(body)
            if part["type"] != "text"
        ]
        return answer_of(_text(body), pictures)

    async def _load(self, part: Body, *, promised: bool) -> bytes:
        """Return the content of a picture for which the request has only metadata."""
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + (WRITTEN_WITHIN_S if promised else 0)
        while True:
            try:
                store = await self._opened()
                entry = await store.get(EntryKey(NAMESPACE, part["uuid"]))
            except StoreError:
                entry = None
            if entry is not None:
                break
            if clock() >= deadline_s:
                raise Unservable("Internal server error")
            await asyncio.sleep(0.02)
        digest = bytes(entry.data[:32])
        if part["image_embeds"] != _flat(_grid(digest)):
            return b"metadata of another picture"
        return digest

    async def _prefill(self, body: Body) -> Answer:
        if not (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            raise Unservable("prefill was not asked to keep its blocks")
        await asyncio.sleep(self._stage_s)
        kept = uuid.uuid4().hex
        self._kept[kept] = await self._compute(body)
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": str(self._port),
            "remote_block_ids": [[1]],
            "remote_request_id": kept,
            "remote_host": "127.0.0.1",
            "remote_port": self._port,
        }
        return _json({"choices": [], "kv_transfer_params": params})

    async def _fetch(self, body: Body) -> str:
        """Return prefill's result for the prompt; without one, decode's own."""
        params = body.get("kv_transfer_params")
        if not params:
            if any(part["type"] == "image_embeds" for part in _parts(body)):
                raise Unservable("Internal server error")
            await asyncio.sleep(self._stage_s)
            return await self._compute(body)
        # Not cancelled with the request: an engine also releases the blocks of cancelled requests.
        fetching = self._later(_fetched_from(params))
        made = await asyncio.shield(fetching)
        if made.split(" ")[0] != answer_of(_text(body), ()):
            return "the KV cache of another prompt"
        return made

    async def _decoded(self, body: Body, content: str) -> Answer:
        more = min(body.get("max_tokens") or 0, MAX_FILLER)
        words = [*content.split(" "), *[FILLER] * more]
        if not body.get("stream"):
            await asyncio.sleep(len(words) * self._token_s)  # head and body are sent together
            choice = {"index": 0, "message": {"role": "assistant", "content": " ".join(words)}}
            return _json({"id": "c", "object": "chat.completion", "choices": [choice]})
        events = [_event(" " * bool(place) + word) for place, word in enumerate(words)]
        return Answer([*events, b"data: [DONE]\n\n"], stream=True, pause_s=self._token_s)

    async def _fetched(self, request: web.Request) -> web.Response:
        """Return prefill's result to decode. Each result is returned once."""
        if self._fault in KV_FAULTS:
            return await EARLY[self._fault](request)
        made = self._kept.pop(request.match_info["id"], None)
        return web.Response(status=404) if made is None else web.Response(text=made)

    async def _set_fault(self, request: web.Request) -> web.Response:
        self._fault = await request.text()
        return web.Response()

    async def _state(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"open": self._open, "asked": self._asked, "kept": len(self._kept)}
        )

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._fault == "sick" else 200)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL}]})

    def _later(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _fetched_from(params: Body) -> str:
    url = f"http://{params['remote_host']}:{params['remote_port']}/kv/{params['remote_request_id']}"
    timeout = aiohttp.ClientTimeout(total=1.0)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.post(url, raise_for_status=True) as reply,
        ):
            return await reply.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Unservable("Internal server error") from error


def _json(value: object) -> Answer:
    return Answer([orjson.dumps(value)])


def _event(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    event = {"id": "c", "object": "chat.completion.chunk", "choices": [choice]}
    return b"data: " + orjson.dumps(event) + b"\n\n"


def _parts(body: Body) -> list[Body]:
    contents = [message["content"] for message in body["messages"]]
    return [part for content in contents if isinstance(content, list) for part in content]


def _text(body: Body) -> str:
    return "".join(part["text"] for part in _parts(body) if part["type"] == "text")


def _digest(part: Body) -> bytes:
    data = part["image_url"]["url"].partition("base64,")[2]
    return hashlib.sha256(base64.b64decode(data)).digest()


def _grid(digest: bytes) -> dict[str, list[list[int]]]:
    """Return the metadata of a picture; most pictures have different metadata."""
    return {"image_grid_thw": [[1, 2 + digest[0], 2 + digest[1]]]}


def _flat(metadata: Mapping[str, list[list[int]]]) -> dict[str, list[int]]:
    return {name: rows[0] for name, rows in metadata.items()}


async def _serve(instance: Instance, port: int) -> None:
    runner = web.AppRunner(instance.app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", type=Role, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--stage-s", type=float, default=0.05)
    parser.add_argument("--token-s", type=float, default=0.02)
    args = parser.parse_args()
    instance = Instance(args.role, args.port, args.store, args.stage_s, args.token_s)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(instance, args.port))


if __name__ == "__main__":
    main()
