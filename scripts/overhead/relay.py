"""Bare aiohttp relay: the cost of its server and its client without EPD.

It runs as a separate process: `python scripts/overhead/relay.py PORT URL`.
"""

import argparse
from collections.abc import AsyncIterator

import aiohttp
import uvloop
from aiohttp import web

SESSION = web.AppKey("session", aiohttp.ClientSession)
INSTANCE = web.AppKey("instance", str)


async def relay(request: web.Request) -> web.StreamResponse:
    """Forward the request's body, and relay the response."""
    body = await request.read()
    url = request.app[INSTANCE] + request.path
    async with request.app[SESSION].request(request.method, url, data=body) as answer:
        if answer.content_length is not None:
            return web.Response(
                status=answer.status,
                body=await answer.read(),
                content_type=answer.content_type,
            )
        response = web.StreamResponse(
            status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]}
        )
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
        return response


async def _session(app: web.Application) -> AsyncIterator[None]:
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        app[SESSION] = session
        yield


def main() -> None:
    """Run the relay on the port of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("url")
    args = parser.parse_args()
    app = web.Application(client_max_size=2**30)
    app[INSTANCE] = args.url
    app.cleanup_ctx.append(_session)
    app.router.add_route("*", "/{path:.*}", relay)
    uvloop.install()
    web.run_app(app, host="127.0.0.1", port=args.port, access_log=None, print=None, backlog=4096)


if __name__ == "__main__":
    main()
