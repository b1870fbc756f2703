"""Fake instances with vLLM's wire format, for behaviour that real engines do not show on demand."""

import asyncio
import hashlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
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


METADATA: Mapping[str, Any] = {
    "image_url": {"image_grid_thw": [1, 36, 54]},
    "video_url": {"video_grid_thw": [2, 16, 16]},
    "audio_url": {"audio_num_tokens": [50]},
    "input_audio": {"audio_num_tokens": [50]},
}
"""Placeholder metadata that encode instances report, by type of the content part."""


ENCODE_TEXT = {"type": "text", "text": "."}
"""Text part that the proxy adds to each encode request."""


def parts_of(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the content parts of messages, without the text of encode requests."""
    contents = [message["content"] for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part for part in parts if part != ENCODE_TEXT]


@dataclass(frozen=True)
class Call:
    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    query: str = ""

    @property
    def parts(self) -> list[dict[str, Any]]:
        """Return the content parts of all messages, without the text of encode requests."""
        return parts_of(self.body["messages"])


@dataclass
class FakeInstance:
    """Fake vLLM server.

    Attributes:
        chat: handler of all endpoints; a test replaces it to make the instance misbehave.
        calls: requests to endpoints that it received.
        aborted: number of its answers that were cancelled because the client disconnected.
        open: number of unfinished chat requests.
        probes: number of requests for `/health`.
        max_model_len: most tokens of a request that it reports; 0 if it reports none.
        metrics: handler of `GET /metrics`.
        connections: connections of the requests in progress.
    """

    chat: Handler
    healthy: bool = True
    profiler: bool = True
    profiled: bytes = b""
    calls: list[Call] = field(default_factory=list)
    other_calls: list[str] = field(default_factory=list)
    aborted: int = 0
    open: int = 0
    probes: int = 0
    url: str = ""
    version: str = "0.33.0"
    models: tuple[str, ...] = ("m",)
    api_key: str | None = None
    max_model_len: int = 0
    metrics: Callable[[], Awaitable[web.Response]] = field(default=lambda: has_none())  # noqa: PLW0108 - defined below

    connections: list[asyncio.Transport] = field(default_factory=list)
    _sites: list[web.TCPSite] = field(default_factory=list)

    async def stop_listening(self) -> None:
        """Stop accepting connections; open connections stay."""
        for site in self._sites:
            await site.stop()
        self._sites.clear()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.open += 1
        assert request.transport is not None
        connection = request.transport
        self.connections.append(connection)
        try:
            is_json = request.content_type == "application/json"
            body = await request.json() if is_json else {"form": await request.read()}
            if self._denies(request):
                return web.json_response({"error": "Unauthorized"}, status=401)
            self.calls.append(Call(request.path, request.headers, body, request.query_string))
            return await self.chat(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        finally:
            self.open -= 1
            self.connections.remove(connection)

    def _denies(self, request: web.Request) -> bool:
        """Return whether vLLM's `--api-key` rejects the request; it guards only /v1 and /v2."""
        key, presented = self.api_key, request.headers.get("Authorization")
        guarded = request.path[:3] in {"/v1", "/v2"}
        return key is not None and guarded and presented != f"Bearer {key}"

    async def _other(self, request: web.Request) -> web.Response:
        if request.path == "/metrics":  # a load report: not a call
            return await self.metrics()
        if request.path == "/health":  # a probe: not a call
            self.probes += 1
            return web.Response(status=200 if self.healthy else 503)
        self.other_calls.append(f"{request.method} {request.path}")
        if self._denies(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        length = {"max_model_len": self.max_model_len} if self.max_model_len else {}
        data = [{"id": name, **length} for name in self.models]
        said = {
            "/v1/models": {"object": "list", "data": data},
            "/version": {"version": self.version},
            "/tokenizer_info": {"tokenizer_class": "T"},
        }.get(request.path)
        if said is None:
            return web.Response(
                status=200 if self.profiler else 404,
                body=self.profiled,
                content_type="application/json" if self.profiled else "text/plain",
            )
        return web.json_response(said)

    @asynccontextmanager
    async def running(
        self, context: ssl.SSLContext | None = None, port: int = 0
    ) -> AsyncIterator["FakeInstance"]:
        app = web.Application(client_max_size=2**30)
        for path in ("/v1/chat/completions", *OTHER_REPLIES):
            app.router.add_post(path, self._chat)
        for path in ("/start_profile", "/stop_profile"):
            app.router.add_post(path, self._other)
        for path in ("/health", "/metrics", "/v1/models", "/version", "/tokenizer_info"):
            app.router.add_get(path, self._other)
        # vLLM's server accepts headers of megabytes.
        runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=0.2, max_field_size=2**20
        )
        await runner.setup()
        self._sites = [web.TCPSite(runner, "127.0.0.1", port, ssl_context=context)]
        await self._sites[0].start()
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


async def encodes(_: web.Request, body: dict[str, Any]) -> web.Response:
    """Reply like an encode instance of vLLM 0.32: with keys, places and placeholder metadata."""
    report: dict[str, dict[str, Any]] = {}
    for index, part in enumerate(parts_of(body["messages"])):
        media = json.dumps({key: value for key, value in part.items() if key != "uuid"})
        key = part.get("uuid") or hashlib.sha256(media.encode()).hexdigest()
        if "mm_processor_kwargs" in body:
            key += json.dumps(body["mm_processor_kwargs"])
            key = hashlib.sha256(key.encode()).hexdigest()
        entry = report.setdefault(key, {"item_indices": [], "metadata": METADATA[part["type"]]})
        entry["item_indices"].append(index)
    return web.json_response({"choices": [], "ec_transfer_params": report})


async def encodes_without_params(_: web.Request, __: dict[str, Any]) -> web.Response:
    """Reply like an encode instance before vLLM 0.32."""
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


def named(event: dict[str, Any]) -> bytes:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()


TEXT = {"type": "output_text", "text": "aé", "annotations": []}
SAID = {
    "type": "message",
    "id": "msg",
    "role": "assistant",
    "status": "completed",
    "content": [TEXT],
}
RESPONSE = {
    "id": "resp",
    "object": "response",
    "created_at": 1,
    "model": "m",
    "output": [SAID],
    "parallel_tool_calls": True,
    "tool_choice": "none",
    "tools": [],
    "status": "completed",
}
MESSAGE = {
    "id": "msg",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "text", "text": "aé"}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 1, "output_tokens": 2},
}
COMPLETION = {
    "id": "c",
    "object": "text_completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "text": "aé", "finish_reason": "stop", "logprobs": None}],
}
SCORES = ("/score", "/v1/score")
RANKINGS = ("/rerank", "/v1/rerank", "/v2/rerank")
OTHER_REPLIES: dict[str, dict[str, Any]] = {
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGE,
    "/v1/messages/count_tokens": {"input_tokens": 3},
    "/v1/embeddings": {
        "object": "list",
        "model": "m",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}],
        "usage": {"prompt_tokens": 1, "total_tokens": 1},
    },
    **{path: {"object": "list", "data": [{"score": 0.5}]} for path in SCORES},
    **{path: {"results": [{"index": 0}]} for path in RANKINGS},
    "/pooling": {"object": "list", "data": [{"data": [0.5]}]},
    "/classify": {"object": "list", "data": [{"label": "cat", "probs": [1.0]}]},
    "/v2/embed": {"id": "embd", "embeddings": {"float": [[0.5]]}},
    "/tokenize": {"count": 2, "max_model_len": 8, "tokens": [1, 2]},
    "/detokenize": {"prompt": "aé"},
    "/v1/audio/transcriptions": {"text": "aé"},
    "/v1/audio/translations": {"text": "aé"},
}
"""Answers of decode at the endpoints other than chat."""


def block_delta(words: str) -> dict[str, Any]:
    delta = {"type": "text_delta", "text": words}
    return {"type": "content_block_delta", "index": 0, "delta": delta}


def text_delta(words: str, number: int) -> dict[str, Any]:
    return {
        "type": "response.output_text.delta",
        "sequence_number": number,
        "delta": words,
        "item_id": "msg",
        "output_index": 0,
        "content_index": 0,
        "logprobs": [],
    }


OTHER_STREAMS: dict[str, list[bytes]] = {
    "/v1/responses": [
        named({"type": "response.created", "sequence_number": 0, "response": RESPONSE}),
        named({"type": "response.in_progress", "sequence_number": 1, "response": RESPONSE}),
        named(text_delta("a", 2)),
        named(text_delta("é", 3)),
        named({"type": "response.completed", "sequence_number": 4, "response": RESPONSE}),
    ],
    "/v1/messages": [
        named({"type": "message_start", "message": MESSAGE | {"content": [], "stop_reason": None}}),
        named(
            {
                "type": "content_block_start",
                "index": 0,
                "content_block": {"type": "text", "text": ""},
            }
        ),
        named(block_delta("a")),
        named(block_delta("é")),
        named({"type": "content_block_stop", "index": 0}),
        named(
            {
                "type": "message_delta",
                "delta": {"stop_reason": "end_turn"},
                "usage": {"output_tokens": 2},
            }
        ),
        named({"type": "message_stop"}),
    ],
    "/v1/completions": [
        b"data: " + json.dumps(COMPLETION).encode() + b"\n\n",
        b"data: [DONE]\n\n",
    ],
}
"""Streamed answers of decode at the endpoints other than chat."""


async def decodes(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    if not body.get("stream"):
        return web.json_response(OTHER_REPLIES.get(request.path, REPLY))
    return await streams(OTHER_STREAMS.get(request.path, STREAM))(request, body)


def streams(events: Sequence[bytes]) -> Handler:
    """Return a handler that streams these events and ends."""

    async def chat(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for event in events:
            await response.write(event)
        return response

    return chat


async def has_none() -> web.Response:
    return web.Response(status=404)


def reports(*engines: tuple[float, float]) -> Callable[[], Awaitable[web.Response]]:
    """Return a metrics page with vLLM's numbers of waiting and running requests per engine."""

    async def metrics() -> web.Response:
        lines = [
            f'vllm:num_requests_{state}{{engine="{number}",model_name="m"}} {engine[place]}'
            for place, state in enumerate(("waiting", "running"))
            for number, engine in enumerate(engines)
        ]
        return web.Response(text="\n".join(["# TYPE x gauge", *lines, ""]))

    return metrics


def page(metrics: str) -> Callable[[], Awaitable[web.Response]]:
    """Return a handler of `GET /metrics` that answers with this text."""

    async def answer() -> web.Response:
        return web.Response(text=metrics)

    return answer


async def hangs(_: web.Request, __: dict[str, Any]) -> web.Response:
    await asyncio.sleep(60)
    raise AssertionError("the request was not cancelled")


async def drops(request: web.Request, _: dict[str, Any]) -> web.Response:
    """Close the connection without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def after(event: asyncio.Event, then: Handler) -> Handler:
    """Return a handler that waits for an event first."""

    async def chat(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await event.wait()
        return await then(request, body)

    return chat


def fails_first(times: int, fault: Handler, then: Handler) -> Handler:
    """Return a handler that fails some times, and then works."""
    calls = 0

    async def chat(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        return await (fault if calls <= times else then)(request, body)

    return chat


def refuses(status: int, message: str = "no") -> Handler:
    """Return a handler that answers with vLLM's error body."""

    async def chat(_: web.Request, __: dict[str, Any]) -> web.Response:
        error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
        return web.json_response({"error": error}, status=status)

    return chat


def streams_then(*events: bytes, then: Handler | None = None) -> Handler:
    """Return a handler that streams some events, then ends cleanly or does something else."""

    async def chat(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(event)
            await asyncio.sleep(0.01)
        if then is not None:
            await then(request, body)
        return response

    return chat
