"""Logs contain nothing of what clients and instances send.

Each secret contains the same marker word. The tests put one into every place of a request that can
hold one.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from epd.tenants import key_line
from tests.requests import image, input_audio, request, text, video
from tests.security.wire import ask
from tests.support.fake_instance import (
    FakeInstance,
    Handler,
    decodes,
    encodes,
    hangs,
    refuses,
    streams,
)
from tests.support.fake_origin import FakeOrigin
from tests.support.fleet import until
from tests.support.programs import EPD

KEY = "key-SECRET-of-alice"
ADMIN = "key-SECRET-of-the-operator"
OWN = "sk-SECRET-of-the-instances"
PAYLOAD = "SECRETpictureSECRETpictureAA"
DATA_URL = f"data:image/png;base64,{PAYLOAD}"
HEADERS = {
    "Authorization": f"Bearer {KEY}",
    "Cookie": "session=SECRETcookie",
    "X-Anything": "SECRETheader",
    "traceparent": "SECRETtrace",
    "tracestate": "SECRETstate",
    "User-Agent": "SECRETagent",
    "Referer": "http://SECRETreferer/",
    "X-Request-Id": "SECRET id, which has a space in it",
}


def broken(raw: bytes) -> Handler:
    """Return a handler that writes these bytes and closes the connection."""

    async def chat(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.write(raw)
        request.transport.close()
        raise ConnectionResetError

    return chat


def says(status: int, said: bytes, **headers: str) -> Handler:
    async def chat(_: web.Request, __: dict[str, Any]) -> web.Response:
        return web.Response(status=status, body=said, headers=headers)

    return chat


SERVING = re.compile(r"url[\"=:]+(http://[0-9.:]+)")
"""Address in the log line that the proxy writes when it listens."""

ERROR = b'{"error": {"message": "SECRETprompt at /srv/SECRET", "type": "x", "param": "SECRET"}}'

MISDEEDS: dict[str, Handler] = {
    "refuses": refuses(400, "SECRETprompt"),
    "is forbidden": says(401, b'{"error": "SECRETkey"}', **{"WWW-Authenticate": "SECRET"}),
    "is busy": says(503, b"SECRETtext", **{"Retry-After": "SECRET"}),
    "fails": says(500, ERROR),
    "fails in plain text": says(500, b"Traceback: SECRETtext at 0x7fSECRET"),
    "redirects": says(302, b"", Location="http://127.0.0.1:9/SECRETlocation?SECRET"),
    "answers no JSON": says(200, b"SECRETbody{"),
    "answers other JSON": says(200, b'{"ec_transfer_params": {"SECRETid": {"SECRET": 1}}}'),
    "answers a list": says(200, b'["SECRET"]'),
    "answers no HTTP": broken(b"HTTP/1.1 2x0 SECRETstatus\r\n\r\n"),
    "answers a wrong header": broken(b"HTTP/1.1 200 OK\r\nSECRET header\x01: x\r\n\r\n"),
    "breaks off": broken(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nSECRET"),
    "chunks wrongly": broken(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nSECRET"),
    "compresses wrongly": says(200, b"SECRET", **{"Content-Encoding": "gzip"}),
    "hangs": hangs,
    "streams an error": streams([b"data: " + ERROR + b"\n\n"]),
    "ends a stream": streams([b"data: SECRETdelta\n\n"]),
    "has another type": says(200, b"SECRET", **{"Content-Type": "SECRET/type"}),
}


@dataclass
class Running:
    """Running proxy at level debug, with all of its output."""

    url: str
    process: subprocess.Popen[str]
    encode: FakeInstance
    decode: FakeInstance
    origin: FakeOrigin
    http: aiohttp.ClientSession
    written: list[str] = field(default_factory=list)

    async def post(self, path: str, body: object, **headers: str) -> int:
        data = BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        headers = {"Content-Type": "application/json"} | HEADERS | headers
        async with self.http.post(self.url + path, data=data, headers=headers) as reply:
            await reply.read()
            return reply.status

    async def chat(self, *parts: Any, **more: Any) -> int:
        return await self.post("/v1/chat/completions", request(*parts, **more))


@asynccontextmanager
async def proxy(folder: Path, log_format: str, *flags: str) -> AsyncIterator[Running]:
    keys = folder / "keys"
    keys.write_text(key_line("alice-SECRET", KEY))
    keys.chmod(0o600)
    encode, decode, origin = FakeInstance(encodes), FakeInstance(decodes), FakeOrigin()
    async with encode.running(), decode.running(), origin.running():
        command = [
            *EPD,
            *("serve", "--host", "127.0.0.1", "--port", "0", "--log-level", "debug"),
            *("--encode-servers-urls", encode.url, "--decode-servers-urls", decode.url),
            *("--log-format", log_format, "--max-items", "3", "--max-body-bytes", "100000"),
            *("--encode-timeout-s", "2", "--first-byte-timeout-s", "2", "--drain-delay-s", "0"),
            # An answer that is not streamed has no other deadline.
            *("--request-timeout-s", "6"),
            *("--ec-store", f"file://{folder}/store", "--api-keys-file", str(keys), *flags),
        ]
        env = {
            "EPD_KEY_SECRET": "SECRETSECRETSECRET",
            "OPENAI_API_KEY": OWN,
            "ADMIN_API_KEY": ADMIN,
        }
        process = subprocess.Popen(  # noqa: ASYNC220 - a thread reads its output
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | env,
        )
        with process, ExitStack() as failing:
            failing.callback(process.kill)  # a test that fails does not wait for the process
            assert process.stdout is not None
            written = list[str]()
            while (serving := SERVING.search("".join(written))) is None:
                written.append(await asyncio.to_thread(process.stdout.readline))
                assert written[-1], written
            url = serving[1]
            reading = asyncio.create_task(asyncio.to_thread(process.stdout.read))
            # A new connection for each request: the proxy closes some just when the client reuses
            # them.
            connector = aiohttp.TCPConnector(force_close=True)
            async with aiohttp.ClientSession(connector=connector) as http:
                running = Running(url, process, encode, decode, origin, http, written)
                try:
                    yield running
                finally:
                    process.send_signal(signal.SIGTERM)
                    running.written.append(await reading)
            failing.pop_all()
        assert process.returncode == 0


def requests() -> Iterator[tuple[str, object]]:
    """Return invalid chat requests that contain secrets."""
    url = "http://127.0.0.1:9/SECRETpath?q=SECRETquery"
    for wrong in (
        b'{"messages": SECRET}',
        b'{"SECRET": "\xff"}',
        b"\xff\xfeSECRET",
        [],
        {"messages": "SECRET"},
        {"messages": ["SECRET"]},
        {"messages": [], "model": {"SECRET": 1}},
        {"messages": [], "cache_salt": ["SECRET"]},
        {"messages": [], "mm_processor_kwargs": {"SECRET": 1}},
        {"messages": [{"content": [{"SECRET": 1}]}]},
        {"messages": [{"content": [{"type": "SECRET", "SECRET": "x"}]}]},
        {"messages": [{"reasoning": {"SECRET": 1}}]},
        {"messages": [], "x": "SECRET" * 20_000},
        request(*[image(DATA_URL)] * 4),
        request(image(DATA_URL, uuid="SECRET/uuid")),
        request({"type": "image_url", "image_url": None, "uuid": "SECRET-unknown"}),
        request({"type": "image_url", "image_url": "SECRET"}),
        request({"type": "image_embeds", "image_embeds": "SECRET"}),
        request({"type": "input_audio", "input_audio": {"SECRET": 1}}),
        *(
            request(image(one))
            for one in (
                url,
                url.replace("http://", "https://"),
                "http://SECRETuser:SECRETpassword@127.0.0.1/",
                "http://SECRET.test/cat.png",
                "http://[SECRET/",
                "http://127.0.0.1:SECRET/",
                "http://127.0.0.1\\SECRET",
                "file:///srv/SECRET.png",
                "SECRET:scheme",
                "data:SECRET/type,SECRET",
                f"data:image/SECRET;base64,{PAYLOAD}!",
            )
        ),
    ):
        yield "/v1/chat/completions", wrong
    part = image(DATA_URL)
    for pushed in (
        {"content": [part], "SECRETfield": 1},
        {"content": [{"type": "SECRET"}]},
        {"content": "SECRET"},
        {"model": ["SECRET"], "content": [part]},
        {"model": "SECRETmodel", "content": [part]},
        b"SECRET",
    ):
        yield "/v1/media", pushed


LINES = [
    "GET /SECRETpath?SECRETquery=1 HTTP/1.1",
    "GET /v1/models?SECRETquery=1 HTTP/1.1",
    "SECRET /v1/models HTTP/1.1",
    "SECRETMETHOD /v1/models HTTP/1.1",
    "GET http://SECREThost/SECRETpath HTTP/1.1",
    "GET /v1/models HTTP/SECRET",
    "DELETE /v1/media/SECRETname?model=SECRETmodel HTTP/1.1",
    "DELETE /v1/media/SECRET%20name HTTP/1.1",
    "GET /metrics?SECRET HTTP/1.1",
    "CONNECT SECRET:1 HTTP/1.1",
]


@pytest.mark.full
@pytest.mark.security("S19")
@pytest.mark.parametrize(("log_format", "fetch"), [("json", "engine"), ("console", "proxy")])
async def test_log_lines_contain_no_prompts_media_or_secrets(
    tmp_path: Path, log_format: str, fetch: str
) -> None:
    flags = ["--media-fetch", "proxy"] if fetch == "proxy" else []
    flags += ["--allow-http-media", "--allow-private-media"] if flags else []
    flags += ["--allowed-media-domains", "127.0.0.1,SECRET.test"] if flags else []
    async with proxy(tmp_path, log_format, *flags) as running:
        await served(running)
        await refused(running)
        await misdeeds(running)
        await ill_wire(running)
        await ended_early(running)
        names = {
            value
            for call in (*running.encode.calls, *running.decode.calls)
            for value in (call.body.get("cache_salt"), *(part.get("uuid") for part in call.parts))
            if value
        }
    written = "".join(running.written)

    lines = [line for line in written.splitlines() if "SECRET" in line.upper()]
    assert lines == []
    assert [name for name in names if name in written] == []
    assert len(names) > 2
    for error in ("invalid_api_key", "invalid_json", "decode_died", "encode_rejected", "admin"):
        assert error == "admin" or error in written


async def served(running: Running) -> None:
    """Send valid requests that contain secrets."""
    part = image(DATA_URL, uuid="SECRETname")
    assert await running.chat(part, text("SECRETwords"), user="SECRETuser") == 200
    assert await running.chat(part, text("SECRETwords"), stream=True) == 200
    assert await running.chat(video(b"SECRETfilm"), input_audio(b"SECRETsound")) == 200
    assert await running.chat(image(f"{running.origin.url}/SECRET?q=SECRET")) == 200
    assert await running.post("/start_profile", {"SECRET": 1}, **{"X-API-Key": ADMIN}) == 200


async def refused(running: Running) -> None:
    """Send requests that the proxy rejects or answers without the instances."""
    for path, body in requests():
        assert await running.post(path, body) in {200, 400, 404, 413, 422, 502, 503, 504}
    chat = "/v1/chat/completions"
    for wrong in (f"Bearer SECRET{KEY}", "Basic SECRET", "SECRET"):
        assert await running.post(chat, {}, Authorization=wrong) == 401
        assert await running.post("/stop_profile", {}, Authorization=wrong) == 401
    assert await running.post("/stop_profile", {}, **{"X-API-Key": "SECRETwrong"}) == 401
    assert await running.post("/stop_profile", b"SECRET", **{"X-API-Key": ADMIN}) == 400
    assert await running.post(chat, b"SECRET", **{"Content-Encoding": "gzip"}) == 415


async def misdeeds(running: Running) -> None:
    """Make instances and origins fail in ways that quote their input."""
    number = 0
    for handler in MISDEEDS.values():
        for instance, good, stream in (
            (running.encode, encodes, False),
            (running.decode, decodes, False),
            (running.decode, decodes, True),
        ):
            if handler is hangs and stream:  # each combination waits for a deadline
                continue
            number += 1
            instance.chat = handler
            data_url = f"data:image/png;base64,SECRETpicture{number:07}"
            await running.chat(image(data_url), text("SECRETwords"), stream=stream)
            instance.chat = good
    for answer in MISDEEDS.values():
        if answer is not hangs:
            running.origin.answer = lambda request, answer=answer: answer(request, {})
            await running.chat(image(f"{running.origin.url}/SECRET{number}?q=SECRET"))
    running.origin.answer = None


async def ill_wire(running: Running) -> None:
    """Send bytes that are not HTTP, or only nearly."""
    for line in LINES:
        await ask(running.url, line, HEADERS.items(), b"SECRETbody")
    for name, value in (("SECRET name", "x"), ("X", "SECRET\x01"), ("X", "SECRET" * 20_000)):
        await ask(running.url, "GET /health HTTP/1.1", [*HEADERS.items(), (name, value)])
    await ask(running.url, "POST /v1/media HTTP/1.1", [("Transfer-Encoding", "SECRET")])


async def ended_early(running: Running) -> None:
    """Send a request and disconnect."""
    running.decode.chat = hangs
    calls = len(running.decode.calls)
    leaving = asyncio.create_task(running.chat(image(DATA_URL), text("SECRETwords")))
    await until(lambda: len(running.decode.calls) > calls)
    leaving.cancel()
    running.decode.chat = decodes
