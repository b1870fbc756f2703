"""Periodic requests to instances for their load and their namespace."""

import asyncio
from collections.abc import Awaitable, Mapping
from contextlib import AbstractAsyncContextManager

from epd.background import Background
from epd.config import ProxyConfig
from epd.config.live import LiveConfig
from epd.errors import ProxyError
from epd.request.polling import Polling, Question
from epd.routing.balance import ItemBalanceName
from epd.routing.instances import ANSWERING, CONSUMERS, Instance, Role
from epd.routing.load import Report
from epd.routing.namespaces import Namespaces
from epd.routing.report_page import read_namespace, read_report
from epd.routing.table import InstanceTable
from epd.upstream.client import Upstream

TICK_S = 0.25
"""Longest interval of the check for due questions, in seconds."""

MAX_PAGE_BYTES = 4 * 1024**2
"""Maximum size of a page of metrics. vLLM's has some 100 KB for each engine and model."""


def reporting(
    table: InstanceTable, upstream: Upstream, live: LiveConfig, background: Background
) -> AbstractAsyncContextManager[None]:
    """Ask for load in the background, every `load_interval_s`, until the context exits.

    Args:
        table: instance table; receives the reports.
        upstream: client for the requests.
        live: configuration with the interval, the timeout and the roles.
        background: runner of the task.
    """

    def due() -> list[Instance]:
        config = live.current
        interval_s = config.load_interval_s
        return table.reports_due(_roles(config) if interval_s else (), interval_s)

    def ask(instance: Instance) -> Awaitable[Report | None]:
        return _ask(instance, upstream, live.current.health_timeout_s)

    def tell(instance: Instance, report: Report | None) -> None:
        table.reported(instance, report, live.current.load_interval_s or TICK_S)

    def tick_s() -> float:
        return min(live.current.load_interval_s / 8 or TICK_S, TICK_S)

    return Polling(Question("reports", due, ask, None, tell, tick_s), background).running()


def asking_namespaces(
    namespaces: Namespaces, upstream: Upstream, live: LiveConfig, background: Background
) -> AbstractAsyncContextManager[None]:
    """Ask instances for their namespaces in the background, until the context exits.

    With `load_interval_s` 0, or without a store, no instance is asked.

    Args:
        namespaces: receives the answers.
        upstream: client for the requests.
        live: configuration with the interval and the timeout.
        background: runner of the task.
    """

    def due() -> list[Instance]:
        config = live.current
        return namespaces.due() if config.load_interval_s and config.ec_store else []

    async def ask(instance: Instance) -> str | None:
        page = await _page(instance, upstream, live.current.health_timeout_s)
        return None if page is None else read_namespace(page)

    question = Question("namespaces", due, ask, None, namespaces.told, lambda: TICK_S)
    return Polling(question, background).running()


def _roles(config: ProxyConfig) -> list[Role]:
    """Return the roles that need load reports: balanced by load, or with ranks to choose."""
    balances: Mapping[Role, ItemBalanceName] = {
        Role.ENCODE: config.encode_balance,
        Role.PREFILL: config.prefill_balance,
        **dict.fromkeys(ANSWERING, config.decode_balance),
    }
    return [role for role, name in balances.items() if name != "round_robin" or role in CONSUMERS]


async def _ask(instance: Instance, upstream: Upstream, timeout_s: float) -> Report | None:
    """Return the instance's report; None if it has none."""
    page = await _page(instance, upstream, timeout_s)
    return None if page is None else read_report(page)


async def _page(instance: Instance, upstream: Upstream, timeout_s: float) -> bytes | None:
    """Return the instance's metrics; None after a failure, which only probes count."""
    try:
        async with asyncio.timeout(timeout_s):
            opened = await upstream.open(
                instance.url + "/metrics", stage="proxy", headers={}, head_timeout_s=timeout_s
            )
            with opened as reply:
                page = await reply.read(idle_s=timeout_s, limit=MAX_PAGE_BYTES)
                return page if reply.ok else None
    except (ProxyError, TimeoutError):
        return None
