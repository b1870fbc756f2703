"""Servers under traffic, faults in all of them at once, and their end."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import ServerDisconnectedError, web

from ec_store import EntryKey, Store, StoreError, open_store
from epd.tenants import key_line
from scripts.ports import free_ports
from tests.compat.surface import constants
from tests.ec_store.entries import entry
from tests.requests import image, request, text
from tests.support.backed import NAMESPACE, Backed, caching
from tests.support.clients import ALICE
from tests.support.fake_instance import (
    STREAM,
    FakeInstance,
    decodes,
    encodes,
    hangs,
    prefills,
    refuses,
    streams_then,
)
from tests.support.fleet import Fleet, Launch
from tests.support.programs import serving

ADMIN = "0123456789abcdef0123456789abcdef"
ENVIRONMENT = {"EPD_ADMIN_API_KEY": ADMIN}
WITHIN_S = 60.0

LABELS = '{engine="0",model_name="m"}'
VLLM_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
FAIL, LEAVE = "this fails", "this client leaves"
KINDS = (FAIL, LEAVE, LEAVE, "new", "text", FAIL, LEAVE, LEAVE, "new", "known")
"""Requests of a second. While everything is broken, their texts tell decode what to do."""


class StoreServer:
    """Process of `ec-store serve`, with its metrics on a port that stays."""

    def __init__(self, url: str) -> None:
        self.url = url
        [port] = free_ports(1)
        self.address = f"127.0.0.1:{port}"
        words = ["serve", url, "--port", str(port), "--interval-s", "1"]
        self._command = [sys.executable, "-m", "ec_store", *words]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            env=os.environ | {"EC_STORE_API_KEY": ADMIN},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextmanager
def opened(server: StoreServer) -> Iterator[Store]:
    """Start a server, and open its store as an engine does."""
    server.start()
    try:
        with open_store(server.url, lazy=True) as store:
            deadline_s = time.monotonic() + WITHIN_S
            while True:
                try:
                    store.register_namespace("m", NAMESPACE)
                    break
                except StoreError:
                    assert time.monotonic() < deadline_s
                    time.sleep(0.05)
            yield store
    finally:
        server.kill()


@dataclass
class Engine:
    """Metrics page of an engine with the connector: its counters grow with time.

    Attributes:
        bypasses: whether it bypasses the store.
    """

    bypasses: bool = False
    began_s: float = field(default_factory=time.monotonic)

    async def page(self) -> web.Response:
        names = constants("ec_store/vllm_connector/metrics.py")
        count = (time.monotonic() - self.began_s) * 10
        gauges = {f"ec_store_{name}": 1.0 for name in names["GAUGES"]}
        gauges |= {"ec_store_breaker_open": float(self.bypasses)} | dict.fromkeys(VLLM_GAUGES, 1.0)
        lines = [f"vllm:{name}{LABELS} {value}" for name, value in gauges.items()]
        lines += [f"vllm:ec_store_{name}_total{LABELS} {count}" for name in names["COUNTERS"]]
        for name in names["HISTOGRAMS"]:
            for bound, share in (("0.1", 0.5), ("+Inf", 1.0)):
                labels = LABELS.replace("}", f',le="{bound}"}}')
                lines.append(f"vllm:ec_store_{name}_bucket{labels} {count * share}")
            lines.append(f"vllm:ec_store_{name}_count{LABELS} {count}")
            lines.append(f"vllm:ec_store_{name}_sum{LABELS} {count / 10}")
        return web.Response(text="\n".join([*lines, ""]))


async def paced(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answer, in a stream with time between its chunks."""
    return await (streams_then(*STREAM) if body.get("stream") else decodes)(http, body)


class Scenario:
    """Servers under traffic; `break_all` causes all faults at once, `mend_all` ends them."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._tasks: list[asyncio.Task[None]] = []
        self._numbers = itertools.count()
        self._left: set[str] = set()
        self._broken = False
        self.engine = Engine()

    async def start(self) -> None:
        """Start all servers, and the traffic."""
        launch, enter = Launch(), self._stack.enter_async_context
        (self._folder / "shm").mkdir(mode=0o700)
        self.memory = StoreServer(f"shm://{self._folder}/shm/used?max_bytes=64MiB")
        self.small = StoreServer(f"shm://{self._folder}/shm/small?max_bytes=8MiB")
        self.files = StoreServer(f"file://{self._folder}/store?max_bytes=1MiB")
        store = self._open(self.memory)
        self._small, self._files = self._open(self.small), self._open(self.files)
        self.backed = Backed(store, self._folder)
        self.backed.encode_s = 0.05
        settings: dict[str, Any] = {"admin_api_key": ADMIN, "probe_interval_s": 0.1, "eject_s": 1}
        url = self.memory.url.partition("?")[0]
        self.main: Fleet = await enter(caching(launch, self.backed, url, prefill=1, **settings))
        limits = {"max_requests": 1, "max_queue": 2, "queue_timeout_s": 600}
        self.queue: Fleet = await enter(launch(**settings, **limits))
        self.unstable: Fleet = await enter(launch(**settings))
        self.vllm = await enter(FakeInstance(decodes, metrics=self.engine.page).running())
        self.main.d.chat = paced
        self._start_programs()
        self._every(0.1, self._ask)
        self._every(0.1, self._write)

    def _open(self, server: StoreServer) -> Store:
        return self._stack.enter_context(opened(server))

    def _start_programs(self) -> None:
        """Start two proxies as programs: one that reloads its keys, and one that dies."""
        self.keys = self._folder / "keys"
        self.write_keys(key_line("alice", ALICE))
        encode, decode = self.unstable.e.url, self.queue.d.url
        self._flags = ["--encode-servers-urls", encode, "--decode-servers-urls", decode]
        keys = ["--api-keys-file", str(self.keys)]
        self.reloads = self._stack.enter_context(serving(*self._flags, *keys, env=ENVIRONMENT))
        [self._port] = free_ports(1)
        self._mortal = self._stack.enter_context(ExitStack())
        self._start_mortal()

    def _start_mortal(self) -> None:
        port = ["--port", str(self._port)]
        self._mortal.enter_context(serving(*self._flags, *port, env=ENVIRONMENT))

    def write_keys(self, line: str) -> None:
        self.keys.write_text(line + "\n")
        self.keys.chmod(0o600)

    @property
    def targets(self) -> dict[str, list[str]]:
        """Addresses that Prometheus scrapes, by job."""
        fleets = (self.main.url, self.queue.url, self.unstable.url, self.reloads[0])
        return {
            "epd": [*(url.removeprefix("http://") for url in fleets), f"127.0.0.1:{self._port}"],
            "vllm": [self.vllm.url.removeprefix("http://")],
            "ec-store": [server.address for server in (self.memory, self.small, self.files)],
        }

    def _every(self, seconds: float, act: Any) -> None:
        async def acts() -> None:
            while True:
                await act()
                await asyncio.sleep(seconds)

        self._tasks.append(asyncio.create_task(acts()))

    async def _ask(self) -> None:
        """Send one of the ten requests of a second, and do not wait for its answer.

        A new picture is sent twice at once.
        """
        number = next(self._numbers)
        kind = KINDS[number % len(KINDS)]
        for _ in range(2 if kind == "new" else 1):
            self._tasks.append(asyncio.create_task(self._send(kind, number)))

    async def _write(self) -> None:
        """Write to the directory, which soon exceeds its quota."""
        key = EntryKey("ns", f"written {next(self._numbers)}")
        with suppress(StoreError):
            await asyncio.to_thread(self._files.put, key, entry(shape=(2**5, 2**10)))

    async def _send(self, kind: str, number: int) -> None:
        parts = {"new": image(b"%d" % number), "known": image(b"cat")}
        part = parts.get(kind, text(f"{kind} {number}"))
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5 if kind == LEAVE else WITHIN_S):
                async with self.main.post(request(part, stream=kind != FAIL)) as reply:
                    await reply.read()

    async def _decode(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Answer as decode does while everything is broken.

        The second request with a text of a client that left releases the blocks of its prefill.
        """
        asked = str(body["messages"])
        if FAIL in asked:
            return await refuses(500)(http, body)
        if LEAVE in asked:
            handler = refuses(503) if asked in self._left else hangs
            self._left.add(asked)
            return await handler(http, body)
        return await paced(http, body)

    async def break_all(self) -> None:
        """Cause all faults."""
        self.memory.kill()
        self.main.e.chat, self.main.e.healthy = refuses(500), False
        self.main.p.chat, self.main.d.chat = prefills, self._decode
        self.queue.d.chat = hangs
        self._faults = [asyncio.create_task(self._flood()) for _ in range(6)]
        self._faults += [asyncio.create_task(act()) for act in (self._overfill, self._flap)]
        self.engine.bypasses = True
        (self._folder / "store").rename(self._folder / "away")
        (self._folder / "store").write_text("")
        self.write_keys("no line of keys")
        self.reloads[1].send_signal(signal.SIGHUP)
        self._mortal.close()

    async def _flood(self) -> None:
        """Send requests to the proxy that has room for one, and for two more that wait."""
        while True:
            with suppress(ServerDisconnectedError):  # the end of the proxy
                async with self.queue.post(request(text())) as reply:
                    await reply.read()
            await asyncio.sleep(1)

    async def _overfill(self) -> None:
        """Write to the small memory, all of which is pinned or leased."""
        large = entry(shape=(2**11, 2**10))
        key = EntryKey("ns", "held")
        await asyncio.to_thread(self._small.put, key, large)
        await asyncio.to_thread(self._small.put, EntryKey("ns", "leased"), entry())
        await asyncio.to_thread(self._small.lease, [EntryKey("ns", "leased")], WITHIN_S)
        held = await asyncio.to_thread(self._small.get, key)
        while held is not None:
            with suppress(StoreError):
                await asyncio.to_thread(self._small.put, EntryKey("ns", "more"), large)
            await asyncio.sleep(0.5)

    async def _flap(self) -> None:
        """Let an instance fail its health checks again and again."""
        while True:
            self.unstable.d.healthy = not self.unstable.d.healthy
            await asyncio.sleep(1)

    async def mend_all(self) -> None:
        """End all faults."""
        for task in self._faults:
            task.cancel()
        await asyncio.wait(self._faults)
        self.memory.start()
        self.main.e.chat, self.main.e.healthy = encodes, True
        self.main.d.chat, self.queue.d.chat = paced, decodes
        self.unstable.d.healthy = True
        self.engine.bypasses = False
        (self._folder / "store").unlink()
        (self._folder / "away").rename(self._folder / "store")
        self.write_keys(key_line("alice", ALICE))
        self.reloads[1].send_signal(signal.SIGHUP)
        self._start_mortal()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Scenario]:
    async with AsyncExitStack() as stack:
        scenario = Scenario(folder, stack)
        await scenario.start()
        try:
            yield scenario
        finally:
            await scenario.end()
