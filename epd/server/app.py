"""Application on aiohttp: its routes, and the components that serve them.

This module is the composition root of the proxy: it is the only one that knows every component.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from functools import cache, partial
from typing import NamedTuple
from urllib.parse import urlsplit

from aiohttp import web

from ec_store.arena.remote_url import is_of_hosts, remote_options
from ec_store.opening import open_proxy_store
from epd.aio import Background
from epd.api.endpoints import ENDPOINTS
from epd.config import ProxyConfig
from epd.config.proxy_config import make_checked_policies
from epd.conversations.conversations import Conversations
from epd.discovery.membership import membership
from epd.discovery.polling import poll_metrics, probe_periodically
from epd.edge.access import Access
from epd.edge.admission import Admission
from epd.edge.drain import DRAIN, Drain
from epd.edge.files import Files
from epd.edge.protocol import DIRECT
from epd.encoder_cache.claims import Claims
from epd.encoder_cache.client import EncoderCache
from epd.encoder_cache.hosts import HostStores
from epd.encoder_cache.identity import Identifiers
from epd.encoder_cache.keys import Keys
from epd.events import InstanceChanged, Observer
from epd.media.fetch import MediaFetcher
from epd.observe.collectors import (
    EventCounts,
    conversation_metrics,
    instance_metrics,
    kv_event_metrics,
    quarantine_metrics,
    store_metrics,
)
from epd.observe.logs import hide_locals
from epd.observe.loop_lag import watched
from epd.observe.metrics import MetricsObserver
from epd.observe.request_log import LogObserver
from epd.observe.tracing import tracing
from epd.policies.registry import Policies
from epd.request.choices import Choices
from epd.request.early_choice import EarlyChoice
from epd.request.encode import Encoder
from epd.request.kv_peers import PeerRegistry
from epd.request.kv_readback import Readbacks
from epd.request.model_names import ModelNames
from epd.request.pipeline import Pipeline
from epd.request.placement import Placement
from epd.request.prefill_decode import PrefillDecodeRunner
from epd.request.quarantine import Quarantine
from epd.request.releases import Releases
from epd.request.stages import Stages
from epd.request.warmup import Warmup
from epd.routing.balance import Choice
from epd.routing.fatal import FatalRequests
from epd.routing.health import HealthState
from epd.routing.instances import ANSWERING, Instance, Role
from epd.routing.registry import Change, InstanceSource, Registry
from epd.routing.store_access import StoreAccess
from epd.routing.table import InstanceTable
from epd.server import api_routes, instance_routes, operator_routes, page_routes
from epd.server.admin import ADMIN, Admin
from epd.server.api_routes import CONVERSATIONS, MEDIA_KEYS, PIPELINE, WARMUP
from epd.server.app_keys import (
    ACCESS,
    ADMISSION,
    BACKGROUND,
    CONFIG,
    KEYS,
    MODELS,
    OBSERVERS,
    TABLE,
    TRACER,
    UNKNOWN,
    VISIT,
)
from epd.server.cors import allow_origins
from epd.server.health import HEALTH, HealthCheck
from epd.server.instance_routes import KV_TRANSFER, REGISTRATIONS, REGISTRY
from epd.server.key_judge import JUDGE, KeyJudge
from epd.server.middlewares import answer_unknown, direct, observe
from epd.server.openapi import openapi_json
from epd.server.operator_routes import METRICS
from epd.server.page_routes import BOARD
from epd.server.responses import response_headers
from epd.transfer.kv import KVTransfer
from epd.transfer.registry import load_ec_transfer, load_kv_transfer
from epd.ui.dashboard import Board
from epd.ui.engine_use import EngineUses
from epd.ui.readings import Readings
from epd.ui.recent import Recent
from epd.upstream import Upstream
from epd.workers.worker import WorkerSlot

RECENT = web.AppKey("recent", Recent)
ENGINE_USES = web.AppKey("engine_uses", EngineUses)

GONE = (HealthState.DOWN, "removed")
"""States of an instance after which its engine and its KV blocks may be lost."""


def create_app(
    config: ProxyConfig,
    observers: Sequence[Observer] | None = None,
    files: Files | None = None,
    slot: WorkerSlot | None = None,
) -> web.Application:
    """Return the proxy as an aiohttp application, to run or to mount in another application.

    Run it with `handler_cancellation=True` (`web.run_app`, `web.AppRunner`): the upstream requests
    of a client that disconnects are then cancelled. `epd.edge.protocol.Runner` sets it, and also
    guards against slow and malformed HTTP.

    Args:
        config: configuration, as `epd serve` makes it of its flags.
        observers: receivers of all events, in addition to the observer for `/metrics`; by
            default one that logs them.
        files: content of the files of keys and certificates; by default they are read here.
        slot: what this process shares with the other workers; None without others.

    Raises:
        KeysInvalid: the keys file cannot be used.
        TlsInvalid: a certificate, a key or a CA cannot be used.
    """
    hide_locals()
    files = files or Files(config)
    app = web.Application(middlewares=(observe,))
    app[CONFIG] = config
    uses = () if slot is None else (partial(slot.shared.ledger.use_of, slot.index),)
    app[ADMISSION] = Admission(config, time.monotonic, *uses)
    if files.keys is not None:
        app[KEYS] = files.keys
    routes = (*ROUTES, *allow_origins(app, config, ROUTES, _options))
    app[ACCESS] = dict[object, Access]((route.handler, access) for access, route in routes)
    app.add_routes([route for _, route in routes])
    app.add_routes([_any("/{anything:.*}", answer_unknown, name=UNKNOWN)])
    app[MODELS] = ModelNames()
    pages = () if slot is None else (slot.shared.pages, slot.index)
    app[METRICS] = MetricsObserver(app[ADMISSION], *pages)
    app[BACKGROUND] = Background(app[METRICS].background_failed)
    app[RECENT] = Recent()
    app[ENGINE_USES] = EngineUses()
    app[DRAIN] = Drain()
    app[DIRECT] = direct(app, api_routes.answer_request)
    observing: tuple[Observer, ...] = (app[METRICS], app[RECENT])
    app[OBSERVERS] = (*observing, *((LogObserver(config),) if observers is None else observers))
    app.cleanup_ctx.append(partial(build_components, files=files, slot=slot))
    return app


async def build_components(
    app: web.Application, files: Files, slot: WorkerSlot | None
) -> AsyncIterator[None]:
    """Fill the application's slots with all that outlives a request (`cleanup_ctx`)."""
    config, background, metrics = app[CONFIG], app[BACKGROUND], app[METRICS]
    async with (
        tracing(config) as tracer,  # closed last: it exports the spans of the other closes
        watched(metrics.loop_lag, background),
        Upstream.connect(files.upstream_tls) as upstream,
        MediaFetcher.open(config) if config.fetches_media else nullcontext() as media,
        _store(config, background) as cache,
        _host_stores(config, background) as stores,
        Conversations.open(config) as conversations,
        _instances(app, upstream, conversations, stores, slot) as fleet,
        _pipeline(app, upstream, media, cache, stores, conversations, fleet) as pipeline,
    ):
        if tracer is not None:
            app[TRACER] = tracer
        app[PIPELINE] = pipeline
        app[WARMUP] = Warmup(pipeline.encode, cache)
        app[CONVERSATIONS] = conversations
        app[ADMIN] = Admin(fleet.table, upstream, config)
        app[HEALTH] = HealthCheck(fleet.table, app[ADMIN], config)
        app[JUDGE] = KeyJudge(partial(app[ADMIN].of_decode, "/v1/models"))
        # Of the URL of a store, only the scheme: the rest may hold a password.
        store = None if config.ec_store is None else urlsplit(config.ec_store).scheme
        boards = () if slot is None else (slot.shared.recents, slot.index)
        caches = partial(_caches, store, cache, stores)
        readings = Readings(fleet.table, upstream, caches, app[ENGINE_USES])
        app[BOARD] = Board(app[RECENT], fleet.table, metrics, store, readings, *boards)
        metrics.add_source(partial(store_metrics, cache or stores))
        metrics.add_source(partial(conversation_metrics, conversations))
        async with readings, _written_pages(metrics, app[BOARD], background):
            yield


def _store(
    config: ProxyConfig, background: Background
) -> AbstractAsyncContextManager[EncoderCache | None]:
    if config.ec_store is None or is_of_hosts(config.ec_store):
        return nullcontext()
    return EncoderCache(partial(open_proxy_store, config.ec_store), config, background)


def _host_stores(
    config: ProxyConfig, background: Background
) -> AbstractAsyncContextManager[HostStores | None]:
    """Return the memories of the instances' hosts; None if all have one store."""
    if config.ec_store is None or not is_of_hosts(config.ec_store):
        return nullcontext()
    return HostStores(remote_options(config.ec_store), config, background)


def _caches(
    kind: str | None, cache: EncoderCache | None, stores: HostStores | None
) -> Mapping[str, EncoderCache]:
    """Return the client of each store of now, by the store's name."""
    if stores is not None:
        return stores.caches
    return {} if cache is None or kind is None else {kind: cache}


class _Instances(NamedTuple):
    """The instances of the proxy, and how they transfer KV blocks."""

    table: InstanceTable
    access: StoreAccess
    transfer: KVTransfer
    policies: Policies


@asynccontextmanager
async def _instances(
    app: web.Application,
    upstream: Upstream,
    conversations: Conversations,
    stores: HostStores | None,
    slot: WorkerSlot | None,
) -> AsyncIterator[_Instances]:
    """Keep the instances up to date: members, health, load and prefix caches."""
    config, background = app[CONFIG], app[BACKGROUND]
    changed = partial(_changed, app[OBSERVERS], conversations)
    table = InstanceTable(
        policy=config.health,
        on_change=lambda instance, state, cause: changed(instance, state, cause=cause),
    )
    transfer = load_kv_transfer(config.kv_transfer)
    access = StoreAccess(table) if stores is None else StoreAccess(table, stores.use_servers)

    def member_changed(instance: Instance, change: Change, source: InstanceSource | None) -> None:
        changed(instance, change, source)
        access.use_servers()

    registry = Registry(
        table, config.instances, fits=transfer.accepts_instance, on_change=member_changed
    )
    policies = make_checked_policies(config)
    fleet = _Instances(table, access, transfer, policies)
    sources = None if slot is None else slot.shared.sources
    async with (
        membership(config, registry, upstream, background, sources) as registrations,
        probe_periodically(table, upstream, config, background),
        poll_metrics(
            table, access, upstream, config, background, note_page=app[ENGINE_USES].note_page
        ),
        _kv_events(table, config, background) as event_counts,
    ):
        app[TABLE], app[KV_TRANSFER] = table, transfer
        app[REGISTRY], app[REGISTRATIONS] = registry, registrations
        app[METRICS].add_source(partial(instance_metrics, table))
        app[METRICS].add_source(partial(kv_event_metrics, table, event_counts))
        yield fleet


@asynccontextmanager
async def _pipeline(  # noqa: PLR0913, PLR0917 - its collaborators
    app: web.Application,
    upstream: Upstream,
    media: MediaFetcher | None,
    cache: EncoderCache | None,
    stores: HostStores | None,
    conversations: Conversations,
    fleet: _Instances,
) -> AsyncIterator[Pipeline]:
    config, (table, access, transfer, policies) = app[CONFIG], fleet
    ec_transfer = load_ec_transfer(config.ec_transfer)
    fatal = FatalRequests(
        config.suspect_s,
        lambda instance: app[DRAIN].began or table.is_draining(instance),
        time.monotonic,
    )
    app[METRICS].add_source(partial(quarantine_metrics, fatal))
    app[MEDIA_KEYS] = keys = Keys(cache)
    stages = Stages(upstream)
    choices = Choices(table)
    by_content = "content" in {config.prefill_balance, config.decode_balance}
    async with aclosing(Releases(stages, transfer, fatal, choices)) as releases:
        prefill_decode = PrefillDecodeRunner(
            table,
            choices,
            stages,
            transfer,
            PeerRegistry(table, transfer, upstream, config) if transfer.has_peers else None,
            Readbacks(table, stages, transfer, conversations),
            releases,
            fatal,
        )
        identifiers, pushed = Identifiers(), ec_transfer.pushed
        encoder = Encoder(
            table,
            Choice(table, Role.ENCODE),
            Choice(table, Role.PREFILL_DECODE, Role.PREFILL),
            stages,
            access,
            ec_transfer,
            fatal,
            Placement(table, access),
            identifiers,
        )
        early_choice = None
        if pushed or cache or stores:  # only instances of a store have namespaces
            early_choice = EarlyChoice(
                table,
                access,
                prefill_decode.choose_first,
                pushed,
                by_content,
                None if cache is None or pushed else Claims(cache),
                stores,
                identifiers,
            )
        yield Pipeline(
            table,
            policies.choose_policy,
            media,
            keys,
            ec_transfer,
            encoder,
            prefill_decode,
            early_choice,
            choices,
            fatal,
            Quarantine(fatal),
            by_content,
        )


@asynccontextmanager
async def _written_pages(
    metrics: MetricsObserver, board: Board, background: Background
) -> AsyncIterator[None]:
    """Write what the other workers read of this one, if there are others."""
    if metrics.workers is None or board.pages is None:
        yield
        return
    async with (
        background.run_task("metrics_page", metrics.workers.pages.keep_writing),
        background.run_task("ui_page", board.pages.keep_writing),
    ):
        yield


def _changed(  # noqa: PLR0913, PLR0917 - the parts of an event, and its receivers
    observers: Sequence[Observer],
    conversations: Conversations,
    instance: Instance,
    state: HealthState | Change,
    source: InstanceSource | None = None,
    cause: str = "",
) -> None:
    event = InstanceChanged(instance.url, instance.role, state, source, cause)
    for observer in observers:
        observer.instance_changed(event)
    if state in GONE and instance.role in ANSWERING:
        conversations.drop_instance(instance.url)


def _kv_events(
    table: InstanceTable, config: ProxyConfig, background: Background
) -> AbstractAsyncContextManager[EventCounts]:
    """Follow the KV events of the instances, if configured. Return a function for their counts."""
    if not config.kv_events:
        return nullcontext(dict)
    from epd.kv_events.following import KVEvents  # noqa: PLC0415 - its libraries are optional

    return KVEvents(table, config).run_events(background)


async def _no_continue(_: web.Request) -> None:
    """Send no `100 Continue` before the checks of the request: `read` sends it later."""


async def openapi(request: web.Request) -> web.Response:
    """Return the OpenAPI document of the proxy."""
    visit = request[VISIT]
    # It takes 0.1 s to make.
    body = await asyncio.to_thread(openapi_document, visit.config.root_path)
    return web.Response(
        body=body, content_type="application/json", headers=response_headers(visit.record)
    )


_get, _post, _delete, _options, _any = (
    partial(declare, expect_handler=_no_continue)
    for declare in (web.get, web.post, web.delete, web.options, partial(web.route, "*"))
)
ROUTES = (
    (Access.OPEN, _get("/health", operator_routes.health)),  # a load balancer has no key
    (Access.OPEN, _get("/ready", operator_routes.ready)),
    (Access.OPEN, _get("/ping", operator_routes.ready)),  # SageMaker's name for it
    (Access.OPEN, _post("/ping", operator_routes.ready)),
    (Access.OPEN, _get("/openapi.json", openapi)),  # it holds no data of this fleet
    (Access.OPEN, _get("/", page_routes.root)),
    (Access.OPEN, _get("/ui", page_routes.page)),  # nor do these
    (Access.OPEN, _get("/ui/{file}", page_routes.page_file)),
    (Access.OPEN, _get("/instances", instance_routes.list_instances)),  # as /health
    (Access.REGISTRAR, _post("/instances", instance_routes.register_instance)),
    (Access.REGISTRAR, _delete("/instances", instance_routes.unregister_instance)),
    *((Access.TENANT, _post(path, api_routes.answer_request)) for path in ENDPOINTS),
    (Access.TENANT, _post("/v1/media", api_routes.push_media)),
    (Access.TENANT, _delete("/v1/media/{uuid}", api_routes.forget_media)),
    (Access.TENANT, _get("/v1/responses/{id}", api_routes.get_response)),
    (Access.TENANT, _post("/v1/responses/{id}/cancel", api_routes.get_response)),
    (Access.TENANT, _get("/v1/models", api_routes.list_models)),
    (Access.TENANT, _get("/tokenizer_info", api_routes.get_tokenizer_info)),
    (Access.TENANT, _get("/version", operator_routes.version)),
    (Access.ADMIN, _get("/metrics", operator_routes.metrics)),
    (Access.ADMIN, _get("/ui/state", page_routes.page_state)),
    (Access.ADMIN, _get("/settings", operator_routes.settings)),
    (Access.ADMIN, _post("/start_profile", operator_routes.start_profile)),
    (Access.ADMIN, _post("/stop_profile", operator_routes.stop_profile)),
)
"""Routes of the proxy, with their classes of access. `openapi.py` describes them.

No other path is forwarded to an instance: many of vLLM's routes need no key, such as those that
change its weights or put it to sleep.
"""


@cache
def openapi_document(prefix: str | None = None) -> bytes:
    """Return the OpenAPI document of the routes.

    Args:
        prefix: path prefix of all routes, which a reverse proxy removes or keeps.
    """
    return openapi_json(ROUTES, prefix)
