"""Components that serve the application's routes: created at its start, closed at its end."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial

from aiohttp import web

from epd.background import Background
from epd.cache.encoder_cache import EncoderCache
from epd.config import ProxyConfig
from epd.conversations import time_to_live
from epd.conversations.conversations import Conversations
from epd.discovery.membership import membership
from epd.edge.drain import DRAIN
from epd.edge.limits import limits_of
from epd.events import InstanceChanged, Observer
from epd.media.fetch import MediaFetcher
from epd.observe.glances import ConversationsGlance, InstancesGlance, StoreGlance
from epd.observe.logs import LogObserver, set_level
from epd.observe.loop_lag import watched
from epd.observe.metrics import MetricsObserver
from epd.observe.tracing import tracing
from epd.request.decoders import Decoders
from epd.request.handover import Handovers
from epd.request.peers import Peers
from epd.request.picker import Picker
from epd.request.pipeline import Pipeline
from epd.request.probes import probing
from epd.request.readbacks import Readbacks
from epd.request.releases import Releases
from epd.request.reports import asking_namespaces, reporting
from epd.request.stages import Stages
from epd.request.warmup import Warmup
from epd.routing.fatal import FatalRequests
from epd.routing.health import State
from epd.routing.instances import ANSWERING, Instance
from epd.routing.namespaces import Namespaces
from epd.routing.registry import Change, Registry, Source
from epd.routing.table import InstanceTable
from epd.server import ui
from epd.server.admin import Admin
from epd.server.keys import JUDGE, KeyJudge
from epd.server.policies import Policies
from epd.server.roster import Roster
from epd.server.slots import (
    ADMISSION,
    BACKGROUND,
    CONFIG,
    OBSERVERS,
    TRACER,
)
from epd.transfer.flavours import EC_TRANSFERS, KV_TRANSFERS
from epd.ui.board import Board
from epd.ui.recent import Recent
from epd.upstream.client import Upstream

PIPELINE = web.AppKey("pipeline", Pipeline)
ADMIN = web.AppKey("admin", Admin)
WARMUP = web.AppKey("warmup", Warmup)
LOG = web.AppKey("log", LogObserver)
METRICS = web.AppKey("metrics", MetricsObserver)
CONVERSATIONS = web.AppKey("conversations", Conversations)
RECENT = web.AppKey("recent", Recent)

TABLE = web.AppKey("table", InstanceTable)
ROSTER = web.AppKey("roster", Roster)
POLICIES = web.AppKey("policies", Policies)

GONE = (State.DOWN, "removed")
"""States of an instance after which its engine and its KV blocks may be lost."""


async def connections(app: web.Application) -> AsyncIterator[None]:
    """Fill the application's slots with all that outlives a request (`cleanup_ctx`)."""
    live, background = app[CONFIG], app[BACKGROUND]
    config = live.current
    conversations = Conversations.of(live)
    changed = partial(_changed, app[OBSERVERS], conversations)
    table = InstanceTable(policy=config.health, on_change=changed)
    transfer = KV_TRANSFERS[config.kv_transfer]()
    fatal = _fatal_requests(app, table)
    namespaces = Namespaces(table)
    registry = Registry(table, config.instances, fits=transfer.fits, on_change=changed)
    async with (
        tracing(config) as tracer,  # closed last: it exports the spans of the other closes
        watched(app[METRICS].loop_lag, background),
        Upstream.connect(config.connect_timeout_s, config.upstream_ca_file) as upstream,
        MediaFetcher.open(live) as media,
        _cache(config, background) as cache,
        conversations,
        membership(config, registry, upstream, background) as registrations,
        probing(table, upstream, live, background),
        reporting(table, upstream, live, background),
        asking_namespaces(namespaces, upstream, live, background),
        Releases.running(stages := Stages(upstream), fatal) as releases,
    ):
        decoders = Decoders(table, Picker(upstream))
        peers = Peers(table, transfer, upstream, live)
        readbacks = Readbacks(table, stages, transfer, conversations)
        handovers = Handovers(table, stages, transfer, peers, decoders, releases, readbacks, fatal)
        encoded = EC_TRANSFERS[config.ec_transfer]()
        app[PIPELINE] = Pipeline(
            table,
            namespaces,
            stages,
            media,
            cache,
            encoded,
            handovers,
            decoders,
            fatal,
            app[POLICIES].decide,
        )
        app[WARMUP] = Warmup(app[PIPELINE], cache)
        app[ADMIN] = Admin(table, upstream, live, app[METRICS])
        app[JUDGE] = KeyJudge(app[ADMIN].models)
        app[CONVERSATIONS] = conversations
        app[TABLE] = table
        app[ROSTER] = Roster(registry, table, registrations, transfer, config)
        app[ui.BOARD] = Board(app[RECENT], table, app[METRICS], ui.store_kind(config))
        if tracer is not None:
            app[TRACER] = tracer
        figures = app[METRICS].registry
        figures.register(InstancesGlance(table))
        figures.register(StoreGlance(cache))
        figures.register(ConversationsGlance(conversations))
        live.follow(partial(_adopt, app, registry, table, upstream, cache))
        yield


def _fatal_requests(app: web.Application, table: InstanceTable) -> FatalRequests:
    return FatalRequests(
        lambda: app[CONFIG].current.suspect_s,
        lambda instance: app[DRAIN].began or table.drains(instance),
        time.monotonic,
    )


def _adopt(  # noqa: PLR0913, PLR0917 - every component with derived state
    app: web.Application,
    registry: Registry,
    table: InstanceTable,
    upstream: Upstream,
    cache: EncoderCache | None,
    config: ProxyConfig,
    before: ProxyConfig,
) -> None:
    """Update all state that is derived from the configuration."""
    set_level(config.log_level)
    app[LOG].adopt(config.kv_lease_s, tenants=config.log_tenants)
    app[ADMISSION].adopt(limits_of(config))
    app[POLICIES].follow(config, before)
    time_to_live.warn_of(config, before)
    registry.replace(Source.CONFIG, config.instances)
    table.judge_by(config.health)
    upstream.connect_within(config.connect_timeout_s)
    if cache is not None:
        cache.adopt(budget_s=config.ec_store_budget_s, lease_s=config.ec_store_lease_s)


def _changed(
    observers: Sequence[Observer],
    conversations: Conversations,
    instance: Instance,
    state: State | Change,
    source: Source | None = None,
) -> None:
    event = InstanceChanged(instance.url, instance.role, state, source)
    for observer in observers:
        observer.instance_changed(event)
    if state in GONE and instance.role in ANSWERING:
        conversations.lost(instance.url)


def _cache(
    config: ProxyConfig, background: Background
) -> AbstractAsyncContextManager[EncoderCache | None]:
    if config.ec_store is None:
        return nullcontext()
    return EncoderCache.connect(
        config.ec_store,
        budget_s=config.ec_store_budget_s,
        lease_s=config.ec_store_lease_s,
        background=background,
    )
