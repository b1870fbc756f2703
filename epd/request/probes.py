"""Asks instances for their health, for as long as the proxy runs."""

import asyncio
from contextlib import AbstractAsyncContextManager, suppress

from epd.background import in_background
from epd.config import ProxyConfig
from epd.errors import Overloaded
from epd.http.upstream import Upstream
from epd.routing.instances import Instance
from epd.routing.table import InstanceTable

TICK_S = 0.25
"""How often it is looked whether a probe is due."""


def probing(
    table: InstanceTable, upstream: Upstream, config: ProxyConfig
) -> AbstractAsyncContextManager[None]:
    """Probe in the background whenever the table says so, until the context is left.

    Args:
        table: told what came of it.
        upstream: what is asked with.
        config: says by when an instance that is well has answered.
    """
    return in_background(_probe_all(table, upstream, config))


async def _probe_all(table: InstanceTable, upstream: Upstream, config: ProxyConfig) -> None:
    async with asyncio.TaskGroup() as group:
        while True:
            for instance in table.probes_due():
                group.create_task(_probe(instance, table, upstream, config.health_timeout_s))
            await asyncio.sleep(TICK_S)


async def _probe(
    instance: Instance, table: InstanceTable, upstream: Upstream, timeout_s: float
) -> None:
    well = None
    with suppress(Overloaded):  # that says nothing of the instance
        well = await upstream.probe(instance.url + "/health", timeout_s=timeout_s)
    table.probed(instance, well=well)
