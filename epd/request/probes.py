"""Health probes of instances, while the proxy runs."""

from contextlib import AbstractAsyncContextManager

from epd.background import Background
from epd.config.live import LiveConfig
from epd.errors import Overloaded
from epd.request.polling import Polling, Question
from epd.routing.instances import Instance
from epd.routing.table import InstanceTable
from epd.upstream.client import Upstream

TICK_S = 0.25
"""Interval of the check for due probes, in seconds."""


def probing(
    table: InstanceTable, upstream: Upstream, live: LiveConfig, background: Background
) -> AbstractAsyncContextManager[None]:
    """Probe instances in the background when they are due, until the context exits.

    Args:
        table: instance table; receives the results.
        upstream: client for the probes.
        live: configuration with the timeout of a probe.
        background: runner of the task. An unexpected exception counts as a failed probe.
    """

    async def probe(instance: Instance) -> bool | None:
        try:
            timeout_s = live.current.health_timeout_s
            return await upstream.probe(instance.url + "/health", timeout_s=timeout_s)
        except Overloaded:  # the proxy's own limit, not the instance's health
            return None

    def tell(instance: Instance, well: bool | None) -> None:
        table.probed(instance, well=well)

    question = Question("probes", table.probes_due, probe, False, tell, lambda: TICK_S)
    return Polling(question, background).running()
