"""Small servers that speak vLLM's wire format, for what real engines cannot be made to do."""

import asyncio
import hashlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]

KV_PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "engine",
    "remote_request_id": "chatcmpl-1",
    "remote_host": "localhost",
    "remote_port": 5559,
    "tp_size": 1,
    "remote_num_tokens": 529,
}


@dataclass(frozen=True)
class Call:
    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]

    @property
    def parts(self) -> list[dict[str, Any]]:
        """The content parts of all messages."""
        contents = [message["content"] for message in self.body["messages"]]
        return [part for content in contents if isinstance(content, list) for part in content]


@dataclass
class FakeInstance:
    """One fake vLLM server.

    Attributes:
        chat: answers `/v1/chat/completions`; replace it to make the instance misbehave.
        calls: the chat requests it was sent.
        aborted: how many of its answers were cancelled because nobody waited any more.
        open: how many chat requests it has that have not ended.
    """

    chat: Handler
    healthy: bool = True
    profiler: bool = True
    calls: list[Call] = field(default_factory=list)
    other_calls: list[str] = field(default_factory=list)
    aborted: int = 0
    open: int = 0
    url: str = ""
    version: str = "0.33.0"
    models: tuple[str, ...] = ("m",)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.open += 1
        try:
            body = await request.json()
            self.calls.append(Call(request.path, request.headers, body))
            return await self.chat(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        finally:
            self.open -= 1

    async def _other(self, request: web.Request) -> web.Response:
        if request.path == "/health":  # it is probed: not a call
            return web.Response(status=200 if self.healthy else 503)
        self.other_calls.append(f"{request.method} {request.path}")
        if request.path == "/v1/models":
            data = [{"id": name} for name in self.models]
            return web.json_response({"object": "list", "data": data})
        if request.path == "/version":
            return web.json_response({"version": self.version})
        return web.Response(status=200 if self.profiler else 404)

    @asynccontextmanager
    async def running(
        self, context: ssl.SSLContext | None = None, port: int = 0
    ) -> AsyncIterator["FakeInstance"]:
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/v1/chat/completions", self._chat)
        for path in ("/start_profile", "/stop_profile"):
            app.router.add_post(path, self._other)
        for path in ("/health", "/v1/models", "/version"):
            app.router.add_get(path, self._other)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.2)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=context).start()
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


async def encodes(_: web.Request, body: dict[str, Any]) -> web.Response:
    """Reply as an encode instance of vLLM 0.32: the key and the placeholder metadata."""
    [part] = body["messages"][0]["content"]
    media = json.dumps({key: value for key, value in part.items() if key != "uuid"})
    key = part.get("uuid") or hashlib.sha256(media.encode()).hexdigest()
    if "mm_processor_kwargs" in body:
        key = hashlib.sha256((key + json.dumps(body["mm_processor_kwargs"])).encode()).hexdigest()
    metadata = {
        "image_url": {"image_grid_thw": [1, 36, 54]},
        "video_url": {"video_grid_thw": [2, 16, 16]},
        "audio_url": {"audio_num_tokens": [50]},
        "input_audio": {"audio_num_tokens": [50]},
    }[part["type"]]
    return web.json_response(
        {"choices": [], "ec_transfer_params": {key: {"item_indices": [0], "metadata": metadata}}}
    )


async def encodes_without_params(_: web.Request, __: dict[str, Any]) -> web.Response:
    """Reply as an encode instance before vLLM 0.32."""
    return web.json_response({"choices": []})


async def prefills(_: web.Request, __: dict[str, Any]) -> web.Response:
    return web.json_response({"choices": [], "kv_transfer_params": KV_PARAMS})


def chunk(text: str) -> bytes:
    delta = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}
    event = {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [delta],
    }
    return b"data: " + json.dumps(event).encode() + b"\n\n"


STREAM = [chunk("a"), chunk("é"), b"data: [DONE]\n\n"]
REPLY = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "aé"},
            "finish_reason": "stop",
        }
    ],
}


async def decodes(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    if not body.get("stream"):
        return web.json_response(REPLY)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for event in STREAM:
        await response.write(event)
    return response


async def hangs(_: web.Request, __: dict[str, Any]) -> web.Response:
    await asyncio.sleep(60)
    raise AssertionError("nobody cancelled this")


async def drops(request: web.Request, _: dict[str, Any]) -> web.Response:
    """End the connection without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def fails_first(times: int, fault: Handler, then: Handler) -> Handler:
    """Fail some times, and never again."""
    calls = 0

    async def chat(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        return await (fault if calls <= times else then)(request, body)

    return chat


def refuses(status: int, message: str = "no") -> Handler:
    """Answer with vLLM's error body."""

    async def chat(_: web.Request, __: dict[str, Any]) -> web.Response:
        error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
        return web.json_response({"error": error}, status=status)

    return chat
