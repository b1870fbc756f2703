"""`ec-store serve`: keeps a store within its quota, and shows it over HTTP."""

import asyncio
import hmac
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from ec_store.aio import AsyncStore
from ec_store.base import StoreStats
from ec_store.entry import EntryInfo
from ec_store.errors import StoreUnavailable
from ec_store.keys import EntryKey

STORE = web.AppKey("store", AsyncStore)
INTERVAL = web.AppKey("interval", float)
API_KEY = web.AppKey("api_key", str)

MAX_LOOKUP_KEYS = 1024
OPEN_PATHS = frozenset({"/health"})

GAUGES = {
    "entries": "Entries in the store.",
    "bytes": "Bytes that they take.",
    "max_bytes": "The store's quota.",
}
COUNTERS = {
    "corrupt": "Entries that this service found corrupt.",
    "evictions": "Entries that this service evicted.",
}


def create_app(store: AsyncStore, *, interval_s: float, api_key: str = "") -> web.Application:
    """The service as an aiohttp application.

    Args:
        store: the store, which is closed with the application.
        interval_s: seconds between two looks at the quota.
        api_key: where it is set, all but `/health` need it as a bearer token.
    """
    app = web.Application(middlewares=[_render_errors, _require_key])
    app[STORE] = store
    app[INTERVAL] = interval_s
    app[API_KEY] = api_key
    app.cleanup_ctx.append(_housekeeping)
    app.add_routes(
        [
            web.get("/health", _health),
            web.get("/metrics", _metrics),
            web.get("/v1/stats", _stats),
            web.post("/v1/lookup", _lookup),
        ]
    )
    return app


async def _housekeeping(app: web.Application) -> AsyncIterator[None]:
    task = asyncio.create_task(_keep_quota(app[STORE], app[INTERVAL]))
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await app[STORE].close()


async def _keep_quota(store: AsyncStore, interval_s: float) -> None:
    while True:
        # A store that is away now may be back at the next look.
        with suppress(StoreUnavailable):
            await store.evict()
        await asyncio.sleep(interval_s)


@web.middleware
async def _render_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _json({"error": error.reason}, error.status)
    except StoreUnavailable as error:
        return _json({"error": str(error)}, 503)


@web.middleware
async def _require_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    key = request.app[API_KEY]
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if key and request.path not in OPEN_PATHS:
        # Digests of one length: a comparison of the keys themselves could tell their length.
        digests = [hmac.digest(b"", text.encode(), "sha256") for text in (key, given)]
        if not hmac.compare_digest(*digests):
            raise web.HTTPUnauthorized
    return await handler(request)


async def _health(request: web.Request) -> web.Response:
    await request.app[STORE].lookup([EntryKey("", "health")])
    return _json({"status": "healthy"})


async def _stats(request: web.Request) -> web.Response:
    store = request.app[STORE]
    return _json(asdict(await store.stats()) | {"namespaces": dict(await store.namespaces())})


async def _metrics(request: web.Request) -> web.Response:
    registry = CollectorRegistry()
    registry.register(_Collector(await request.app[STORE].stats()))
    return web.Response(
        body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
    )


class _Collector:
    """The figures of one look at a store."""

    def __init__(self, stats: StoreStats) -> None:
        self._stats = asdict(stats)

    def collect(self) -> list[Metric]:
        """The metrics whose figures the backend knows."""
        known = {name: value for name, value in self._stats.items() if value is not None}
        gauges: list[Metric] = [
            GaugeMetricFamily(f"ec_store_{name}", text, value=known[name])
            for name, text in GAUGES.items()
            if name in known
        ]
        return gauges + [
            CounterMetricFamily(f"ec_store_{name}", text, value=known[name])
            for name, text in COUNTERS.items()
        ]


async def _lookup(request: web.Request) -> web.Response:
    """`{"namespace": …, "identifiers": […]}`: what each header says, or null."""
    try:
        body = orjson.loads(await request.read())
    except orjson.JSONDecodeError:
        raise web.HTTPBadRequest(reason="the body is not JSON") from None
    match body:
        case {"namespace": str() as namespace, "identifiers": list() as identifiers} if all(
            isinstance(identifier, str) for identifier in identifiers
        ):
            pass
        case _:
            raise web.HTTPBadRequest(reason="namespace and a list of identifiers are needed")
    if len(identifiers) > MAX_LOOKUP_KEYS:
        raise web.HTTPBadRequest(reason=f"at most {MAX_LOOKUP_KEYS} identifiers")
    try:
        keys = [EntryKey(namespace, identifier) for identifier in identifiers]
    except ValueError as error:
        raise web.HTTPBadRequest(reason=str(error)) from None
    infos = await request.app[STORE].lookup(keys)
    return _json({"entries": [info and _described(info) for info in infos]})


def _described(info: EntryInfo) -> Mapping[str, Any]:
    return {
        "dtype": info.dtype,
        "shape": info.shape,
        "modality": info.modality,
        "metadata": info.metadata,
        "size_bytes": info.size_bytes,
    }


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")
