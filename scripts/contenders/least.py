"""Minimal EPD proxy with aiohttp's server and the proxy's own client: the lower bound of the cost.

It has no store, keys, checks, metrics, limits, logs or retries. Its cost is a lower bound for any
proxy made of the same parts. It runs as a separate process:
`python scripts/contenders/least.py PORT ENCODE_URL PREFILL_URL DECODE_URL`, each URL or `disable`.
"""

import argparse
import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson
import uvloop
from aiohttp import web

from epd.config.fields import NO_INSTANCES
from epd.errors import Stage
from epd.upstream import Reply, Upstream

PATH = "/v1/chat/completions"
TIMEOUT_S = 60.0
ONE_TOKEN = {"max_tokens": 1, "stream": False}


@dataclass(frozen=True, slots=True)
class Instances:
    """URLs of one instance per role; None for a role without an instance."""

    encode: str | None
    prefill: str | None
    decode: str


INSTANCES = web.AppKey("instances", Instances)
UPSTREAM = web.AppKey("upstream", Upstream)


async def answer(request: web.Request) -> web.StreamResponse:
    """Send each picture to encode, the request to prefill, and relay decode's response."""
    raw = await request.read()
    upstream, to = request.app[UPSTREAM], request.app[INSTANCES]
    headers = {"Content-Type": "application/json", "X-Request-Id": secrets.token_hex(16)}
    body: dict[str, Any] = orjson.loads(raw)

    async def fetched(url: str, stage: Stage, asked: object) -> Any:
        sent = (orjson.dumps(asked),)
        whole = await upstream.fetch(
            url + PATH, stage=stage, headers=headers, body=sent, timeout_s=TIMEOUT_S
        )
        return orjson.loads(whole.body)

    pictures = [part for part in _parts(body) if part["type"] == "image_url"]
    if to.encode and pictures:
        alone = [
            {**body, **ONE_TOKEN, "messages": [{"role": "user", "content": [part]}]}
            for part in pictures
        ]
        await asyncio.gather(*[fetched(to.encode, "encode", item) for item in alone])
        for part in pictures:  # without its media, with an id of the length of a key
            part |= {"image_url": None, "uuid": secrets.token_hex(32)}
        raw = orjson.dumps(body)
    if to.prefill:
        prefilled = await fetched(to.prefill, "prefill", {**body, **ONE_TOKEN})
        params = prefilled.get("kv_transfer_params")
        raw = orjson.dumps({**body, "kv_transfer_params": params})
    opened = await upstream.open(
        to.decode + PATH, stage="decode", headers=headers, body=(raw,), head_timeout_s=TIMEOUT_S
    )
    with opened as reply:
        return await _relayed(request, reply)


def _parts(body: dict[str, Any]) -> list[dict[str, Any]]:
    contents = [message["content"] for message in body["messages"]]
    return [part for content in contents if isinstance(content, list) for part in content]


async def _relayed(request: web.Request, reply: Reply) -> web.StreamResponse:
    headers = {"Content-Type": reply.headers["Content-Type"]}
    if not headers["Content-Type"].startswith("text/event-stream"):
        return web.Response(body=await reply.read(idle_s=TIMEOUT_S), headers=headers)
    stream, client = web.StreamResponse(headers=headers), request.transport
    await stream.prepare(request)

    def write(chunk: bytes) -> bool:
        if client is not None and not client.is_closing():
            client.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        return True

    await reply.pour_body(write, TIMEOUT_S)
    await stream.write_eof()
    return stream


async def _well(_: web.Request) -> web.Response:
    return web.Response()


async def _connected(app: web.Application) -> AsyncIterator[None]:
    async with Upstream.connect(TIMEOUT_S) as app[UPSTREAM]:
        yield


def create_app(instances: Instances) -> web.Application:
    """Return the application of the minimal proxy."""
    app = web.Application(client_max_size=2**30)
    app[INSTANCES] = instances
    app.cleanup_ctx.append(_connected)
    app.router.add_get("/health", _well)
    app.router.add_post(PATH, answer)
    return app


def main() -> None:
    """Run the minimal proxy on the port of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    for role in ("encode", "prefill", "decode"):
        parser.add_argument(role, type=lambda url: None if url in NO_INSTANCES else url)
    args = parser.parse_args()
    app = create_app(Instances(args.encode, args.prefill, args.decode))
    uvloop.install()
    web.run_app(app, host="127.0.0.1", port=args.port, access_log=None, print=None, backlog=4096)


if __name__ == "__main__":
    main()
