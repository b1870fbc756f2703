"""Asks instances for their health, for as long as the proxy runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from epd.config import ProxyConfig
from epd.errors import Overloaded
from epd.http.upstream import Upstream
from epd.routing.instances import Instance
from epd.routing.table import InstanceTable

TICK_S = 0.25
"""How often it is looked whether a probe is due."""


@asynccontextmanager
async def probing(
    table: InstanceTable, upstream: Upstream, config: ProxyConfig
) -> AsyncIterator[None]:
    """Probe in the background whenever the table says so, until the context is left.

    Args:
        table: told what came of it.
        upstream: what is asked with.
        config: says by when an instance that is well has answered.
    """
    task = asyncio.create_task(_probe_all(table, upstream, config))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


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
