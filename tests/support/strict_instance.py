"""Fake instances that accept only what their KV connector accepts, and report every error.

`async with strict(launch, "mooncake", prefill=2, decode=2) as (fleet, wire)`: every request to
prefill and decode is checked. At the end, no instance may keep blocks or wait for any. The
parameters of an instance, and its reaction to them, are written here from the connectors' own
source, independently of `epd.transfer`.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.support.fake_instance import OTHER_REPLIES, OTHER_STREAMS, REPLY, STREAM, FakeInstance
from tests.support.fleet import Fleet, Launch
from tests.support.invariants import becomes

OF_ONE = (
    *("max_tokens", "max_completion_tokens", "stream", "stream_options", "min_tokens"),
    "ec_transfer_params",
)
"""Fields in which a prefill request differs from its decode request."""

KEEP = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


Answers = Callable[[str, dict[str, Any]], tuple[dict[str, Any], Sequence[bytes]]]
"""Decode's answer to a request at a path: the whole body, and the events of a stream."""


def canned(path: str, _: dict[str, Any]) -> tuple[dict[str, Any], Sequence[bytes]]:
    """Return the same answer for all requests."""
    return OTHER_REPLIES.get(path, REPLY), OTHER_STREAMS.get(path, STREAM)


class Wrong(Exception):
    """An instance received something that its connector does not accept."""


@dataclass
class Blocks:
    """KV blocks of one prefill, present or future: their prompt and their place."""

    prefill: FakeInstance | None = None
    rank: str | None = None
    prompt: dict[str, Any] = field(default_factory=dict)
    ready: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Asked:
    """Request as an instance receives it."""

    instance: FakeInstance
    request_id: str
    rank: str | None
    body: dict[str, Any]
    params: Any

    @property
    def prompt(self) -> dict[str, Any]:
        dropped = {*OF_ONE, "kv_transfer_params"}
        return {name: value for name, value in self.body.items() if name not in dropped}


class Wire:
    """Connector between instances. The base class is vLLM's ExampleConnector, without parameters.

    Attributes:
        wrong: errors that were found.
        made: blocks that decode has not fetched, by the key that decode looks them up with.
        fetched: number of fetches of blocks by the decode that they were made for.
        own_ranks: data-parallel rank that an instance uses if the request names none; None: it has
            one rank.
        answers: returns the answers to requests.
    """

    concurrent = False
    own_ranks: Iterator[str | None] = itertools.repeat(None)
    answers: Answers = staticmethod(canned)

    def __init__(self, prefill: int, decode: int) -> None:
        self.wrong: list[str] = []
        self.made: dict[Any, Blocks] = {}
        self.fetched = 0
        self.prefills: list[FakeInstance] = []
        self.decodes: list[FakeInstance] = []
        self._ids: set[str] = set()

    async def begin(self, stack: AsyncExitStack) -> dict[str, Any]:
        """Return the part of the proxy's configuration for the connector."""
        return {}

    def settle(self, prefills: list[FakeInstance], decodes: list[FakeInstance]) -> None:
        """Make these instances use only this connector."""
        self.prefills, self.decodes = prefills, decodes
        for one in prefills:
            one.chat = self._prefilling(one)
        for one in decodes:
            one.chat = self._decoding(one)

    def key(self, asked: Asked) -> Any:
        """Return the key by which decode finds the blocks of a prefill request."""
        self.is_equal("a prefill's kv_transfer_params", asked.params, None)
        return str(asked.prompt)

    def wanted(self, asked: Asked) -> Any:
        """Return the key of the blocks that a decode request needs."""
        self.is_equal("a decode's kv_transfer_params", asked.params, None)
        return str(asked.prompt)

    def reply(self, asked: Asked) -> Any:
        """Return what prefill reports about its blocks."""
        return None

    def left(self) -> Iterable[Any]:
        """Return the blocks that instances keep at the end, but must not."""
        return self.made

    def is_equal(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            raise Wrong(f"{what}: {found!r} and not {expected!r}")

    def _prefilling(self, instance: FakeInstance) -> Any:
        async def chat(request: web.Request, body: dict[str, Any]) -> web.Response:
            with self._noted():
                asked = _asked(instance, request, body)
                if asked.request_id in self._ids:
                    raise Wrong(f"two prefills are called {asked.request_id}")
                self._ids.add(asked.request_id)
                self._check_prefill(asked)
                key = self.key(asked)
                blocks = self.made.setdefault(key, Blocks())
                asked.rank = asked.rank or next(self.own_ranks)
                blocks.prefill, blocks.rank, blocks.prompt = instance, asked.rank, asked.prompt
                blocks.ready.set()
                return web.json_response({"choices": [], "kv_transfer_params": self.reply(asked)})

        return chat

    def _decoding(self, instance: FakeInstance) -> Any:
        async def chat(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            with self._noted():
                asked = _asked(instance, request, body)
                # It has no EC connector.
                self.is_equal("ec_transfer_params", body.get("ec_transfer_params"), None)
                key = self.wanted(asked)
                if self.concurrent:
                    self.made.setdefault(key, Blocks())
                if key not in self.made:
                    raise Wrong(f"decode asks for blocks that no prefill has made: {key}")
                blocks = self.made[key]
                whole, events = self.answers(request.path, body)
                if not body.get("stream"):
                    await self._fetch(key, blocks, asked)
                    return web.json_response(whole)
                # vLLM sends the head at once, and then waits for the blocks.
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
                await self._fetch(key, blocks, asked)
                for event in events:
                    await response.write(event)
                return response

        return chat

    async def _fetch(self, key: Any, blocks: Blocks, asked: Asked) -> None:
        try:
            await blocks.ready.wait()
        finally:
            self.made.pop(key, None)  # decode tells prefill about an aborted request
        self.is_equal("decode's prompt", asked.prompt, blocks.prompt)
        self.fetched += 1

    def _check_prefill(self, asked: Asked) -> None:
        body = asked.body
        self.is_equal("prefill's max_tokens", body.get("max_tokens"), 1)
        self.is_equal("max_completion_tokens", body.get("max_completion_tokens", 1), 1)
        self.is_equal("prefill's stream", body.get("stream"), False)
        for name in ("stream_options", "min_tokens"):
            self.is_equal(f"prefill's {name}", body.get(name), None)

    def _noted(self) -> "_Noted":
        return _Noted(self.wrong)


class _Noted:
    """Context that records an error; the request then fails with it."""

    def __init__(self, wrong: list[str]) -> None:
        self._wrong = wrong

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self._wrong.append(f"{type(error).__name__}: {error}")


class NixlWire(Wire):
    """`nixl/pull_scheduler.py`: prefill reports where its blocks are, decode receives the same.

    Attributes:
        generation: suffix of the engine ids; changes when the engines are replaced.
    """

    generation = ""

    def key(self, asked: Asked) -> Any:
        self.is_equal("a prefill's kv_transfer_params", asked.params, KEEP)
        return asked.request_id

    def reply(self, asked: Asked) -> Any:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2]],
            **self.engine(asked.instance, asked.rank),
            "remote_request_id": asked.request_id,
            "remote_host": "127.0.0.1",
            "tp_size": 1,
        }

    def engine(self, instance: FakeInstance, rank: str | None) -> dict[str, Any]:
        """Return the engine of a data-parallel rank, which has its own id and side channel."""
        end = "" if rank is None else f"_dp{rank}"
        engine_id = f"engine-{instance.url}{self.generation}{end}"
        return {"remote_engine_id": engine_id, "remote_port": 5600 + int(rank or 0)}

    def wanted(self, asked: Asked) -> Any:
        key = (asked.params or {}).get("remote_request_id")
        blocks = self.made.get(key)
        if blocks is None or blocks.prefill is None:
            raise Wrong(f"decode was told of blocks that no instance has: {asked.params}")
        engine = self.engine(blocks.prefill, blocks.rank)
        expected = self.reply(asked) | {"remote_request_id": key, **engine}
        self.is_equal("a decode's kv_transfer_params", asked.params, expected)
        return key


class PushWire(NixlWire):
    """`nixl/push_scheduler.py`, `push_worker.py`: both sides use the same request id."""

    concurrent = True

    def reply(self, asked: Asked) -> Any:
        # vLLM's internal id has the API's prefix and a random suffix.
        own = f"chatcmpl-{asked.request_id}-0a1b2c3d"
        pushed = {"remote_request_id": own, "pp_size": 1, "transfer_mode": "push"}
        return super().reply(asked) | pushed

    def wanted(self, asked: Asked) -> Any:
        params = dict(asked.params or {})
        engine = {name: params.get(name) for name in ("remote_engine_id", "remote_port")}
        known = [self.engine(one, rank) for one in self.prefills for rank in (None, *"01234567")]
        if engine not in known:
            raise Wrong(f"no prefill instance is {engine}")
        coordinates = {**engine, "remote_host": "127.0.0.1", "tp_size": 1, "pp_size": 1}
        if "remote_block_ids" in params:  # decode is asked after prefill has answered
            made = self.made[asked.request_id]
            has = made.prefill and self.engine(made.prefill, made.rank)
            self.is_equal("the prefill engine", engine, has)
            expected = self.reply(asked) | coordinates
        else:
            told = {"do_remote_prefill": True, "do_remote_decode": False}
            expected = coordinates | told | {"remote_request_id": asked.request_id}
        self.is_equal("a decode's kv_transfer_params", params, expected)
        return asked.request_id

    def left(self) -> Iterable[Any]:
        return ()  # until its lease ends


class MooncakeWire(Wire):
    """`mooncake/mooncake_connector.py`, and a bootstrap server for each prefill instance."""

    concurrent = True

    def __init__(self, prefill: int, decode: int) -> None:
        super().__init__(prefill, decode)
        self.engines = [{"0": f"engine-{n}-0"} for n in range(prefill)]
        self.queries = [0] * prefill
        self.broken: tuple[int, str] | None = None
        """Status and body of the first bootstrap server's answers, if they are wrong."""
        self.bootstraps: list[str] = []

    async def begin(self, stack: AsyncExitStack) -> dict[str, Any]:
        for n in range(len(self.engines)):
            self.bootstraps.append(await stack.enter_async_context(self._bootstrap(n)))
        return {"prefill_kv_addrs": tuple(self.bootstraps)}

    @asynccontextmanager
    async def _bootstrap(self, n: int) -> AsyncIterator[str]:
        async def query(_: web.Request) -> web.StreamResponse:
            self.queries[n] += 1
            return self.answer(n)

        app = web.Application()
        app.router.add_get("/query", query)
        async with TestServer(app) as server:
            yield f"127.0.0.1:{server.port}"

    def answer(self, n: int) -> web.StreamResponse:
        """Return the answer of a bootstrap server."""
        if n == 0 and self.broken is not None:
            status, body = self.broken
            return web.Response(status=status, text=body)
        said = {
            rank: {"engine_id": engine_id, "worker_addr": {"0": {"0": "tcp://10.0.0.1:1"}}}
            for rank, engine_id in self.engines[n].items()
        }
        return web.json_response(said)

    def key(self, asked: Asked) -> Any:
        params = dict(asked.params or {})
        transfer_id = params.pop("transfer_id", None)
        told = {"do_remote_decode": True, "do_remote_prefill": False}
        self.is_equal("a prefill's kv_transfer_params", params, told)
        if not transfer_id or asked.request_id not in transfer_id:
            raise Wrong(f"{transfer_id!r} may be another request's transfer")
        engines = self.engines[self.prefills.index(asked.instance)]
        if asked.rank is None and len(engines) > 1:
            raise Wrong("the rank of this prefill is unknown")
        rank = next(iter(engines)) if asked.rank is None else asked.rank
        return (transfer_id, engines[rank])

    def wanted(self, asked: Asked) -> Any:
        params = dict(asked.params or {})
        transfer_id, engine_id = params.pop("transfer_id", ""), params.get("remote_engine_id")
        engines = {own: n for n, ranks in enumerate(self.engines) for own in ranks.values()}
        if engine_id not in engines:
            raise Wrong(f"no bootstrap server knows {engine_id}")
        expected = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": f"http://{self.bootstraps[engines[engine_id]]}",
            "remote_engine_id": engine_id,
        }
        self.is_equal("a decode's kv_transfer_params", params, expected)
        return (transfer_id, engine_id)


class LMCacheWire(Wire):
    """`lmcache_integration/vllm_v1_adapter.py`: prefill is told the address of decode's LMCache."""

    def __init__(self, prefill: int, decode: int) -> None:
        super().__init__(prefill, decode)
        self.ports = [(7300 + n, 7400 + n) for n in range(decode)]

    async def begin(self, stack: AsyncExitStack) -> dict[str, Any]:
        addresses = (f"10.0.0.{n}:{init}:{alloc}" for n, (init, alloc) in enumerate(self.ports))
        return {"decode_kv_addrs": tuple(addresses)}

    def key(self, asked: Asked) -> Any:
        spec = (asked.params or {}).get("disagg_spec") or {}
        n = self.ports.index((spec["receiver_init_port"][0], spec["receiver_alloc_port"][0]))
        expected = {
            "disagg_spec": {
                "req_id": asked.request_id,
                "receiver_host": f"10.0.0.{n}",
                "receiver_init_port": [self.ports[n][0]],
                "receiver_alloc_port": [self.ports[n][1]],
            }
        }
        self.is_equal("a prefill's kv_transfer_params", asked.params, expected)
        return (self.decodes[n].url, str(asked.prompt))

    def wanted(self, asked: Asked) -> Any:
        self.is_equal("a decode's kv_transfer_params", asked.params, None)
        return (asked.instance.url, str(asked.prompt))

    def left(self) -> Iterable[Any]:
        return ()  # until decode's LMCache evicts it


class MoRIIOWire(Wire):
    """`moriio/moriio_connector.py`: each prefill writes to the decode that it is told.

    Decode gets what prefill reports, with a transfer id that both know.
    """

    def __init__(self, prefill: int, decode: int) -> None:
        super().__init__(prefill, decode)
        self.ports = [(6301 + n, 61005 + n) for n in range(decode)]
        self.targets: dict[str, str] = {}
        """URL of the decode instance of each transfer, by its id."""

    async def begin(self, stack: AsyncExitStack) -> dict[str, Any]:
        addresses = (f"10.0.0.{n}:{one}:{other}" for n, (one, other) in enumerate(self.ports))
        return {"decode_kv_addrs": tuple(addresses)}

    def key(self, asked: Asked) -> Any:
        params = dict(asked.params or {})
        transfer_id = params.pop("transfer_id", None)
        n = self.ports.index((params["remote_handshake_port"], params["remote_notify_port"]))
        expected = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_host": f"10.0.0.{n}",
            "remote_handshake_port": self.ports[n][0],
            "remote_notify_port": self.ports[n][1],
            "remote_engine_id": None,
            "remote_block_ids": None,
        }
        self.is_equal("a prefill's kv_transfer_params", params, expected)
        if not transfer_id or transfer_id in self.targets:
            raise Wrong(f"{transfer_id!r} may be another request's transfer")
        self.targets[transfer_id] = self.decodes[n].url
        return transfer_id

    def reply(self, asked: Asked) -> Any:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2]],
            "remote_engine_id": f"engine-{asked.instance.url}",
            "remote_host": "127.0.0.1",
            "remote_handshake_port": 6301,
            "remote_notify_port": 61005,
            "remote_dp_rank": int(asked.rank or 0),
            "transfer_id": asked.params["transfer_id"],
        }

    def wanted(self, asked: Asked) -> Any:
        transfer_id = (asked.params or {}).get("transfer_id")
        blocks = self.made.get(transfer_id)
        if blocks is None or blocks.prefill is None:
            raise Wrong(f"decode was told of blocks that no instance has: {asked.params}")
        prefill = Asked(blocks.prefill, "", blocks.rank, {}, asked.params)
        self.is_equal("a decode's kv_transfer_params", asked.params, self.reply(prefill))
        target = self.targets[str(transfer_id)]
        self.is_equal("the decode instance that prefill writes to", asked.instance.url, target)
        return transfer_id


def _asked(instance: FakeInstance, request: web.Request, body: dict[str, Any]) -> Asked:
    headers = request.headers
    return Asked(
        instance,
        headers["X-Request-Id"],
        headers.get("X-data-parallel-rank"),
        body,
        body.get("kv_transfer_params"),
    )


WIRES: dict[str, type[Wire]] = {
    "nixl": NixlWire,
    "multi": NixlWire,
    "nixl-push": PushWire,
    "mooncake": MooncakeWire,
    "lmcache": LMCacheWire,
    "moriio": MoRIIOWire,
    "none": Wire,
    "example": Wire,
    "offloading": Wire,
}
"""Connectors by the name of the transfer."""


@asynccontextmanager
async def strict(
    launch: Launch,
    transfer: str,
    *,
    encode: int = 1,
    prefill: int = 1,
    decode: int = 1,
    **config: Any,
) -> AsyncIterator[tuple[Fleet, Any]]:
    """Run a fleet with instances that accept only correct requests.

    Yields:
        The fleet, and the `Wire` that its instances share.
    """
    wire = WIRES[transfer](prefill, decode)
    async with AsyncExitStack() as stack:
        own = await wire.begin(stack)
        settings = {"kv_transfer": transfer, **own, **config}
        counts = {"encode": encode, "prefill": prefill, "decode": decode}
        async with launch(**counts, **settings) as fleet:
            wire.settle(fleet.prefill, fleet.decode)
            yield fleet, wire
            assert wire.wrong == []
            await becomes(lambda: [*wire.left()], [])
