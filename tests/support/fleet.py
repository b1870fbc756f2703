"""The proxy on a real socket, in front of fake instances."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from io import BytesIO
from itertools import chain
from typing import Any

import aiohttp
from aiohttp import web

import epd
from epd.edge.listening import Site
from epd.edge.protocol import Runner
from epd.events import InstanceChanged, RequestRecord, StageDone
from epd.server.app_keys import BACKGROUND, CONFIG, OBSERVERS
from tests.support.fake_instance import FakeInstance, decodes, encodes, prefills


@dataclass
class Recorder:
    """Observer that records all events."""

    stages: list[StageDone] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    changes: list[InstanceChanged] = field(default_factory=list)

    def stage_done(self, event: StageDone) -> None:
        self.stages.append(event)

    def request_done(self, event: RequestRecord) -> None:
        self.requests.append(event)

    def instance_changed(self, event: InstanceChanged) -> None:
        self.changes.append(event)


@dataclass
class Fleet:
    """Running proxy and the instances behind it.

    Attributes:
        runner: server of the proxy.
        unparsed: number of messages from the test that are not HTTP and do not count as requests.
    """

    runner: web.AppRunner
    url: str
    http: aiohttp.ClientSession
    events: Recorder
    encode: list[FakeInstance]
    prefill: list[FakeInstance]
    decode: list[FakeInstance]
    unparsed: int = field(default=0, init=False)

    @property
    def instances(self) -> list[FakeInstance]:
        return [*self.encode, *self.prefill, *self.decode]

    @property
    def e(self) -> FakeInstance:
        return self.encode[0]

    @property
    def p(self) -> FakeInstance:
        return self.prefill[0]

    @property
    def d(self) -> FakeInstance:
        return self.decode[0]

    async def chat(
        self, body: dict[str, Any] | bytes, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        async with self.post(body, headers) as reply:
            return reply.status, await reply.json(content_type="application/json")

    async def ready(self) -> None:
        """Wait until the proxy is ready."""
        while True:
            async with self.http.get(f"{self.url}/ready") as reply:
                if reply.status == 200:
                    return
            await asyncio.sleep(0.01)

    def post(
        self, body: dict[str, Any] | bytes, headers: dict[str, str] | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        data = BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        given = {"Content-Type": "application/json", **(headers or {})}
        return self.http.post(f"{self.url}/v1/chat/completions", headers=given, data=data)


DEFAULTS: dict[str, Any] = {"load_interval_s": 0, "host": "127.0.0.1"}
"""Configuration without load reports, for a loopback address.

A load report leaves a connection open. The proxy retries a request once on a new connection if an
instance drops it on a reused one, and does not count that as a failure.
"""


class Launch:
    """Starts fleets: `async with launch(encode=2, prefill=1) as fleet`.

    Attributes:
        starting: number of encode instances that fail their health checks at first.
    """

    starting = 0

    @asynccontextmanager
    async def __call__(
        self, encode: int = 1, prefill: int = 0, decode: int = 1, **config: Any
    ) -> AsyncIterator[Fleet]:
        """Run a fleet. With `servers=N`, its only instances are N servers, in `Fleet.decode`."""
        if servers := config.pop("servers", 0):
            encode, decode = 0, servers
        groups = {
            "encode": [FakeInstance(encodes, number >= self.starting) for number in range(encode)],
            "prefill": [FakeInstance(prefills) for _ in range(prefill)],
            "decode": [FakeInstance(decodes) for _ in range(decode)],
        }
        async with AsyncExitStack() as stack:
            for instance in chain.from_iterable(groups.values()):
                await stack.enter_async_context(instance.running())
            urls = {
                f"{role}_servers_urls": tuple(instance.url for instance in instances)
                for role, instances in groups.items()
            }
            if servers:
                urls = {"servers_urls": urls["decode_servers_urls"]}
            events = Recorder()
            settings = DEFAULTS | urls | config
            app = epd.create_app(epd.ProxyConfig(**settings), observers=[events])
            live = app[CONFIG]
            runner = Runner(app, live, app[OBSERVERS])
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await Site(
                runner, None, app[BACKGROUND], socket.create_server(("127.0.0.1", 0))
            ).start()
            http = await stack.enter_async_context(aiohttp.ClientSession())
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield Fleet(runner, url, http, events, **groups)


async def until(condition: Callable[[], object], timeout_s: float = 20) -> None:
    """Wait for a condition that another server makes true.

    The timeout is generous: a machine may be busy, and the proxy's own deadlines are long too.
    """
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - other servers set no event
            await asyncio.sleep(0.01)
