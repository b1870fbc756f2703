"""Clients of `chaos.py`: what they ask, what they know the answer must be, and what they got."""

import asyncio
import base64
import hashlib
import random
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from io import BytesIO
from typing import Any, Literal

import aiohttp
import orjson
from PIL import Image

from scripts.chaos_instance import FILLER, MODEL, answer_of

PATIENCE_S = 60.0
"""A request that has not ended by then is lost."""

POOL = 100
"""Pictures that are asked about again and again."""

MORE_WORDS = 30
"""Kilobytes, and words of them, that others ask for at most."""

SLOW_WORDS = 400
"""Kilobytes that a slow reader asks for."""

MOST_TOLD = 300
"""Characters of an answer that are shown."""

MAX_BODY_BYTES = 256 * 1024
"""What the proxy is told to refuse beyond."""

Result = Literal[
    "right",  # the answer that was due
    "error",  # an error of the proxy's, whole and in OpenAI's shape
    "broken off",  # the same, as the last event of a stream
    "left",  # the client went
    "wrong",  # another answer
    "cut off",  # the connection ended before the answer did
    "lost",  # no end at all, or a clean one without [DONE]
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
    """A picture, and what stands for it in an answer."""

    url: str
    digest: bytes

    @classmethod
    def draw(cls, rng: random.Random) -> "Picture":
        """Noise."""
        buffer = BytesIO()
        Image.frombytes("RGB", (24, 24), rng.randbytes(24 * 24 * 3)).save(buffer, "PNG")
        data = base64.b64encode(buffer.getvalue()).decode()
        return cls(f"data:image/png;base64,{data}", hashlib.sha256(buffer.getvalue()).digest())


@dataclass(frozen=True)
class Question:
    """A request, and how its client behaves.

    Attributes:
        name: what figures call it.
        body: what is sent.
        answer: the answer that is due; None: an error of `status` is.
        stream: whether a stream is asked for.
        status: of the error that is due.
        leaves_after_s: when the client goes; None: it waits.
        reads_slowly: whether it takes its time over a long answer.
        cut: whether it goes in the middle of its body.
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
    """How a request ended.

    Attributes:
        name: what was asked.
        stream: whether a stream was.
        began_s: when, on the loop's clock.
        ended_s: when it ended.
        result: how.
        status: the HTTP status, or the code of the error event.
        slug: the error's, where one was told.
        detail: what was seen, for who looks into it.
        request_id: the proxy's.
        port: the client's, of its connection; 0 where it is not known.
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
        """What figures count it as."""
        told = f" {self.status} {self.slug}".rstrip() if self.status and self.slug else ""
        return f"{self.result}{told}"


class Questions:
    """A mix of requests, the same for the same seed."""

    def __init__(self, rng: random.Random) -> None:
        """Draw the pictures that come again."""
        self._rng = rng
        self._pool = [Picture.draw(rng) for _ in range(POOL)]

    def plain(self) -> Question:
        """One that must be answered."""
        count = self._rng.choices((0, 1, 4), weights=(3, 5, 2))[0]
        pictures = [self._picture() for _ in range(count)]
        stream = self._rng.random() < 0.6  # noqa: PLR2004
        return self._about(pictures, stream=stream, max_tokens=self._rng.randrange(MORE_WORDS))

    def any(self) -> Question:
        """One that may be bad, of a client that may be."""
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
    """A client's connection: one for each request, so that no other request can end it.

    Attributes:
        port: the client's, of the last one; 0: not connected yet.
    """

    def __init__(self) -> None:
        self.port = 0

    def session(self) -> aiohttp.ClientSession:
        """A session whose connections it knows."""
        connector = aiohttp.TCPConnector(force_close=True, socket_factory=self._socket)
        return aiohttp.ClientSession(connector=connector)

    def _socket(self, address: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol, *_ = address
        opened = socket.socket(family, kind, protocol)
        opened.setblocking(False)
        opened.bind(("127.0.0.1", 0))  # a port that is known before it is connected
        self.port = opened.getsockname()[1]
        return opened


@dataclass
class Clients:
    """Clients that ask one question after the other until they are told to stop.

    Attributes:
        url: of the proxy.
        questions: what they ask.
        outcomes: how all that have ended did.
    """

    url: str
    questions: Questions
    outcomes: list[Outcome] = field(default_factory=list)

    async def run(
        self, count: int, until: asyncio.Event, next_question: Callable[[], Question]
    ) -> None:
        """Ask, `count` at a time."""
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._client(until, next_question))

    async def _client(self, until: asyncio.Event, next_question: Callable[[], Question]) -> None:
        line = Line()
        async with line.session() as http:
            while not until.is_set():
                outcome = await ask(http, self.url, next_question(), line)
                self.outcomes.append(outcome)
                if outcome.result == "error":
                    await asyncio.sleep(0.05)  # refused at once, nobody asks again at once


async def ask(
    http: aiohttp.ClientSession, url: str, question: Question, line: Line | None = None
) -> Outcome:
    """Ask, and see how it ends.

    Args:
        http: what to ask with.
        url: of the proxy.
        question: what to ask.
        line: whose session it is.
    """
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
    """Send half a body, and go."""
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
    said = orjson.loads(await reply.read())
    return _compared(said["choices"][0]["message"]["content"], question)


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
    """What each event says."""
    held = b""
    async for chunk in reply.content.iter_any():
        *events, held = (held + chunk).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                yield event.removeprefix(b"data: ")
        await asyncio.sleep(pause_s)


def _compared(said: str, question: Question) -> dict[str, Any]:
    if said == question.answer:
        return {"result": "right"}
    seen, due = (words.replace(FILLER, "x") for words in (said, question.answer or ""))
    return {"result": "wrong", "detail": f"{seen[:MOST_TOLD]} in place of {due[:MOST_TOLD]}"}


def _error(body: bytes, reply: aiohttp.ClientResponse) -> dict[str, Any]:
    """An error, once it has been found to be of OpenAI's shape."""
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
