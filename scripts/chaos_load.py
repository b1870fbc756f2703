"""Clients of `chaos.py`: their requests, the expected responses, and the outcomes."""

import asyncio
import base64
import hashlib
import random
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from io import BytesIO
from typing import Any, Literal

import aiohttp
import orjson
from PIL import Image

from scripts.chaos_instance import FILLER, MODEL, answer_of

PATIENCE_S = 60.0
"""Time after which a request without an end is lost, in seconds."""

POOL = 100
"""Number of pictures that requests reuse."""

MORE_WORDS = 30
"""Upper bound of the additional words of a response, each of one kilobyte."""

SLOW_WORDS = 400
"""Kilobytes of a response to a slow reader."""

MOST_TOLD = 300
"""Upper bound of the characters of a response that the report shows."""

MAX_BODY_BYTES = 256 * 1024
"""Limit of a request body that the proxy is configured with, in bytes."""

Result = Literal[
    "right",  # the expected response
    "error",  # a complete error of the proxy in OpenAI's shape
    "broken off",  # the same, as the last event of a stream
    "left",  # the client disconnected
    "wrong",  # another response
    "cut off",  # the connection ended before the response did
    "lost",  # no end, or a clean end without [DONE]
    "misshapen",  # an end that no OpenAI client can read
]

BROKEN_BODIES = (
    b"",
    b"{",
    b"[]",
    b"\xff\xfe{}",
    b'{"model": "m"}',
    b'{"model": "m", "messages": null}',
    b'{"model": "m", "messages": [null]}',
    b'{"model": "m", "messages": [{"role": "user", "content": [1]}]}',
    b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "image_embeds"}]}]}',
    b'{"model": "m", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
)


@dataclass(frozen=True)
class Picture:
    """Picture with its digest, which responses contain."""

    url: str
    digest: bytes

    @classmethod
    def draw(cls, rng: random.Random) -> "Picture":
        buffer = BytesIO()
        Image.frombytes("RGB", (24, 24), rng.randbytes(24 * 24 * 3)).save(buffer, "PNG")
        data = base64.b64encode(buffer.getvalue()).decode()
        return cls(f"data:image/png;base64,{data}", hashlib.sha256(buffer.getvalue()).digest())


@dataclass(frozen=True)
class Question:
    """Request, with the behaviour of its client.

    Attributes:
        name: name in the report.
        body: body of the request.
        answer: expected response; None: an error of `status` is expected.
        stream: whether the request asks for a stream.
        status: status of the expected error.
        leaves_after_s: seconds after which the client disconnects; None: it waits.
        reads_slowly: whether the client reads a long response slowly.
        cut: whether the client disconnects in the middle of its body.
    """

    name: str
    body: bytes
    answer: str | None
    stream: bool = False
    status: int = HTTPStatus.OK
    leaves_after_s: float | None = None
    reads_slowly: bool = False
    cut: bool = False


@dataclass(frozen=True)
class Outcome:
    """Outcome of a request.

    Attributes:
        name: name of the request in the report.
        stream: whether the request asked for a stream.
        began_s: start on the loop's clock, in seconds.
        ended_s: end on the same clock.
        result: kind of the outcome.
        status: HTTP status, or the code of the error event.
        slug: slug of the error; empty without one.
        detail: details for the investigation of a failure.
        request_id: request id of the proxy.
        port: client's port of the connection; 0 if it is unknown.
    """

    name: str
    stream: bool
    began_s: float
    ended_s: float
    result: Result
    status: int = 0
    slug: str = ""
    detail: str = ""
    request_id: str = ""
    port: int = 0

    @property
    def kind(self) -> str:
        detail = f" {self.status} {self.slug}".rstrip() if self.status and self.slug else ""
        return f"{self.result}{detail}"


class Questions:
    """Random mix of requests, repeatable for the same seed."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._pool = [Picture.draw(rng) for _ in range(POOL)]

    def plain(self) -> Question:
        count = self._rng.choices((0, 1, 4), weights=(3, 5, 2))[0]
        pictures = [self._picture() for _ in range(count)]
        stream = self._rng.random() < 0.6  # noqa: PLR2004
        return self._about(pictures, stream=stream, max_tokens=self._rng.randrange(MORE_WORDS))

    def any(self) -> Question:
        """Return any request: valid or not, of a client that may misbehave."""
        kinds = (self.plain, self._slow, self._leaver, self._broken, self._oversized, self._cut)
        return self._rng.choices(kinds, weights=(76, 4, 10, 5, 2, 3))[0]()

    def _picture(self) -> Picture:
        if self._rng.random() < 0.5:  # noqa: PLR2004
            return self._rng.choice(self._pool)
        return Picture.draw(self._rng)

    def _about(self, pictures: Sequence[Picture], *, stream: bool, **more: Any) -> Question:
        words = f"question {self._rng.getrandbits(64):x}"
        content: list[Any] = [
            {"type": "image_url", "image_url": {"url": picture.url}} for picture in pictures
        ]
        content.insert(self._rng.randint(0, len(content)), {"type": "text", "text": words})
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}]} | more
        answer = answer_of(words, [picture.digest for picture in pictures])
        answer += (" " + FILLER) * more["max_tokens"]
        name = {0: "text", 1: "one picture"}.get(len(pictures), f"{len(pictures)} pictures")
        return Question(name, orjson.dumps(body | {"stream": stream}), answer, stream)

    def _slow(self) -> Question:
        asked = self._about([self._picture()], stream=True, max_tokens=SLOW_WORDS)
        return Question("slow reader", asked.body, asked.answer, stream=True, reads_slowly=True)

    def _leaver(self) -> Question:
        asked = self.plain()
        leaves_after_s = self._rng.uniform(0.0, 0.6)
        return Question(
            "leaver", asked.body, asked.answer, asked.stream, leaves_after_s=leaves_after_s
        )

    def _broken(self) -> Question:
        return Question("malformed", self._rng.choice(BROKEN_BODIES), None, status=400)

    def _oversized(self) -> Question:
        return Question("oversized", b" " * (MAX_BODY_BYTES + 4096), None, status=413)

    def _cut(self) -> Question:
        return Question("cut body", self.plain().body, None, cut=True)


class Line:
    """Connections of a client, one per request, so that no other request can end it.

    Attributes:
        port: client's port of the latest connection; 0 before the first one.
    """

    def __init__(self) -> None:
        self.port = 0

    def session(self) -> aiohttp.ClientSession:
        """Return a session that opens its connections through this object."""
        connector = aiohttp.TCPConnector(force_close=True, socket_factory=self._socket)
        return aiohttp.ClientSession(connector=connector)

    def _socket(self, address: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol, *_ = address
        opened = socket.socket(family, kind, protocol)
        opened.setblocking(False)
        opened.bind(("127.0.0.1", 0))  # so that the port is known before the connection
        self.port = opened.getsockname()[1]
        return opened


@dataclass
class Clients:
    """Clients that send one request after the other until an event is set.

    Attributes:
        url: base URL of the proxy.
        questions: source of the requests.
        outcomes: outcomes of all ended requests.
    """

    url: str
    questions: Questions
    outcomes: list[Outcome] = field(default_factory=list)

    async def run(self, count: int, until: asyncio.Event) -> None:
        """Send requests with `count` concurrent clients until the event is set."""
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._client(until))

    async def _client(self, until: asyncio.Event) -> None:
        line = Line()
        async with line.session() as http:
            while not until.is_set():
                outcome = await ask(http, self.url, self.questions.any(), line)
                self.outcomes.append(outcome)
                if outcome.result == "error":
                    await asyncio.sleep(0.05)  # a rejected client does not retry at once


async def ask(
    http: aiohttp.ClientSession, url: str, question: Question, line: Line | None = None
) -> Outcome:
    """Send a request, and return its outcome."""
    line = line or Line()
    line.port = 0
    clock = asyncio.get_running_loop().time
    began_s = clock()
    seen: dict[str, Any] = {"result": "lost", "detail": f"no end within {PATIENCE_S:g} s"}
    try:
        async with asyncio.timeout(PATIENCE_S):
            seen = await _asked(http, url, question, line)
    except TimeoutError:
        pass
    except (aiohttp.ClientError, OSError) as error:
        seen = {"result": "cut off", "detail": repr(error)}
    return Outcome(question.name, question.stream, began_s, clock(), **seen, port=line.port)


async def _asked(
    http: aiohttp.ClientSession, url: str, question: Question, line: Line
) -> dict[str, Any]:
    try:
        async with asyncio.timeout(question.leaves_after_s):
            if question.cut:
                return await _cut_off(url, question, line)
            async with http.post(
                f"{url}/v1/chat/completions",
                data=BytesIO(question.body),
                headers={"Content-Type": "application/json"},
                read_bufsize=1024 if question.reads_slowly else 2**16,
            ) as reply:
                return await _read(reply, question)
    except TimeoutError:
        if question.leaves_after_s is None:
            raise
        return {"result": "left"}


async def _cut_off(url: str, question: Question, line: Line) -> dict[str, Any]:
    """Send half of a body, and disconnect."""
    host, _, port = url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    line.port = writer.get_extra_info("sockname")[1]
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
    writer.write(f"{head}Content-Length: {len(question.body)}\r\n\r\n".encode())
    writer.write(question.body[: len(question.body) // 2])
    await writer.drain()
    writer.transport.abort()
    return {"result": "left"}


async def _read(reply: aiohttp.ClientResponse, question: Question) -> dict[str, Any]:
    try:
        seen = await _judge(reply, question)
    except (ValueError, KeyError) as error:
        seen = {"result": "misshapen", "detail": repr(error)}
    return seen | {"request_id": reply.headers.get("x-request-id", "")}


async def _judge(reply: aiohttp.ClientResponse, question: Question) -> dict[str, Any]:
    if reply.status != HTTPStatus.OK:
        seen = _error(await reply.read(), reply)
        if question.answer is None and seen["result"] == "error":
            seen["result"] = "right" if reply.status == question.status else "wrong"
        return seen
    if question.stream:
        return await _judge_stream(reply, question)
    answer = orjson.loads(await reply.read())
    return _compared(answer["choices"][0]["message"]["content"], question)


async def _judge_stream(reply: aiohttp.ClientResponse, question: Question) -> dict[str, Any]:
    words: list[str] = []
    async for data in _events(reply, pause_s=0.002 if question.reads_slowly else 0.0):
        if data == b"[DONE]":
            return _compared("".join(words), question)
        event = orjson.loads(data)
        if "error" in event:
            return _error(data, reply) | {"result": "broken off"}
        words.append(event["choices"][0]["delta"]["content"])
    return {"result": "lost", "detail": "the stream ended without [DONE]"}


async def _events(reply: aiohttp.ClientResponse, pause_s: float) -> AsyncIterator[bytes]:
    """Yield the data of each event, and pause after each chunk."""
    held = b""
    async for chunk in reply.content.iter_any():
        *events, held = (held + chunk).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                yield event.removeprefix(b"data: ")
        await asyncio.sleep(pause_s)


def _compared(text: str, question: Question) -> dict[str, Any]:
    if text == question.answer:
        return {"result": "right"}
    seen, due = (words.replace(FILLER, "x") for words in (text, question.answer or ""))
    return {"result": "wrong", "detail": f"{seen[:MOST_TOLD]} instead of {due[:MOST_TOLD]}"}


def _error(body: bytes, reply: aiohttp.ClientResponse) -> dict[str, Any]:
    """Return the fields of an error's outcome; `misshapen` if it is not in OpenAI's shape."""
    headers: Mapping[str, str] = reply.headers
    slug = headers.get("x-epd-error", "")
    try:
        error = orjson.loads(body)["error"]
        shaped = isinstance(error["message"], str) and isinstance(error["type"], str)
        code = int(error["code"])
    except (ValueError, KeyError, TypeError):
        shaped, code = False, reply.status
    sound = shaped and (reply.status == HTTPStatus.OK or (code == reply.status and bool(slug)))
    return {
        "result": "error" if sound else "misshapen",
        "status": code,
        "slug": slug,
        "detail": body[:MOST_TOLD].decode(errors="replace"),
    }
