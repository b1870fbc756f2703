"""Requests that bypass aiohttp's router, and requests that do not."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.abc import AbstractMatchInfo
from aiohttp.typedefs import Handler
from aiohttp.web_urldispatcher import UrlDispatcher

import epd
from epd.edge.protocol import Runner
from epd.server.app_keys import CONFIG, OBSERVERS
from tests.requests import request, text
from tests.support.fake_instance import FakeInstance, decodes
from tests.support.fleet import DEFAULTS

PATH = "/v1/chat/completions"


@asynccontextmanager
async def serving(change: Callable[[web.Application], None]) -> AsyncIterator[str]:
    """Run a proxy with an application that is changed before it starts; yield its URL."""
    async with FakeInstance(decodes).running() as decode:
        urls = {"encode_servers_urls": (decode.url,), "decode_servers_urls": (decode.url,)}
        app = epd.create_app(epd.ProxyConfig(**DEFAULTS | urls), observers=[])
        change(app)
        live = app[CONFIG]
        runner = Runner(app, live, app[OBSERVERS])
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def asked(url: str) -> tuple[int, str | None]:
    """Return the status of an answer, and a header that the application's own code adds."""
    async with aiohttp.ClientSession() as http, http.post(url, json=request(text())) as reply:
        await reply.read()
        return reply.status, reply.headers.get("X-Added")


def nothing(_: web.Application) -> None:
    pass


def a_middleware(app: web.Application) -> None:
    @web.middleware
    async def add(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        response.headers["X-Added"] = "middleware"
        return response

    app.middlewares.append(add)


def a_signal(app: web.Application) -> None:
    async def add(_: web.Request, response: web.StreamResponse) -> None:
        response.headers["X-Added"] = "signal"

    app.on_response_prepare.append(add)


def a_signal_at_startup(app: web.Application) -> None:
    async def start(app: web.Application) -> None:
        a_signal(app)

    app.on_startup.append(start)


@pytest.mark.parametrize(
    ("change", "added"),
    [
        (nothing, None),
        (a_middleware, "middleware"),
        (a_signal, "signal"),
        (a_signal_at_startup, "signal"),
    ],
)
async def test_added_middlewares_and_signals_see_every_request(
    change: Callable[[web.Application], None], added: str | None
) -> None:
    async with serving(change) as url:
        assert await asked(f"{url}{PATH}") == (200, added)
        assert await asked(f"{url}{PATH}?a=b") == (200, added)


@pytest.mark.parametrize(("query", "status"), [("", 200), ("?a=b", 500)])
async def test_the_router_is_not_asked_for_a_path_of_the_api(
    monkeypatch: pytest.MonkeyPatch, query: str, status: int
) -> None:
    routers, resolve = list[object](), UrlDispatcher.resolve

    async def fail(self: UrlDispatcher, asked: web.Request) -> AbstractMatchInfo:
        if self in routers:
            raise RuntimeError("the router was asked")
        return await resolve(self, asked)

    monkeypatch.setattr(UrlDispatcher, "resolve", fail)
    async with serving(lambda app: routers.append(app.router)) as url:
        assert await asked(f"{url}{PATH}{query}") == (status, None)
