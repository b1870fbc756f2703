"""Asks instances what they have to do, for as long as the proxy runs."""

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

from epd.background import in_background
from epd.config import ProxyConfig
from epd.errors import ProxyError
from epd.http.upstream import Upstream
from epd.routing.balance import ItemBalanceName
from epd.routing.instances import ANSWERING, CONSUMERS, Instance, Role
from epd.routing.load import Report
from epd.routing.report_page import read_report
from epd.routing.table import InstanceTable

TICK_S = 0.25
"""How often it is looked whether a question is due, at least."""

MAX_PAGE_BYTES = 4 * 1024**2
"""Of a page of metrics: vLLM's have some 100 KB for each engine and model."""


def reporting(
    table: InstanceTable, upstream: Upstream, config: ProxyConfig
) -> AbstractAsyncContextManager[None]:
    """Ask in the background, every `load_interval_s`, until the context is left.

    Args:
        table: told what came of it.
        upstream: what is asked with.
        config: says how often, by when there has to be an answer, and for which roles it matters.
    """
    return in_background(_ask_all(table, upstream, config))


async def _ask_all(table: InstanceTable, upstream: Upstream, config: ProxyConfig) -> None:
    async with asyncio.TaskGroup() as group:
        while True:
            interval_s = config.load_interval_s
            for instance in table.reports_due(_roles(config) if interval_s else (), interval_s):
                group.create_task(_ask(instance, table, upstream, config))
            await asyncio.sleep(min(interval_s / 8 or TICK_S, TICK_S))


def _roles(config: ProxyConfig) -> list[Role]:
    """Those among whose instances it is chosen by load; consumers' ranks always are."""
    balances: Mapping[Role, ItemBalanceName] = {
        Role.ENCODE: config.encode_balance,
        Role.PREFILL: config.prefill_balance,
        **dict.fromkeys(ANSWERING, config.decode_balance),
    }
    return [role for role, name in balances.items() if name != "round_robin" or role in CONSUMERS]


async def _ask(
    instance: Instance, table: InstanceTable, upstream: Upstream, config: ProxyConfig
) -> None:
    report: Report | None = None
    try:
        async with (
            asyncio.timeout(config.health_timeout_s),
            upstream.open(
                instance.url + "/metrics",
                stage="proxy",
                headers={},
                head_timeout_s=config.health_timeout_s,
            ) as reply,
        ):
            page = await reply.read(idle_s=config.health_timeout_s, limit=MAX_PAGE_BYTES)
            report = read_report(page) if reply.ok else None
    except (ProxyError, TimeoutError):
        report = None  # it gives none, and is judged by its probes
    table.reported(instance, report, config.load_interval_s or TICK_S)
