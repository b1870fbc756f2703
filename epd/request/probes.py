"""Asks instances for their health, for as long as the proxy runs."""

from contextlib import AbstractAsyncContextManager

from epd.background import Background
from epd.config.live import LiveConfig
from epd.errors import Overloaded
from epd.request.polling import Polling, Question
from epd.routing.instances import Instance
from epd.routing.table import InstanceTable
from epd.upstream.client import Upstream

TICK_S = 0.25
"""How often it is looked whether a probe is due."""


def probing(
    table: InstanceTable, upstream: Upstream, live: LiveConfig, background: Background
) -> AbstractAsyncContextManager[None]:
    """Probe in the background whenever the table says so, until the context is left.

    Args:
        table: told what came of it.
        upstream: what is asked with.
        live: says by when an instance that is well has answered.
        background: runs it. An instance whose probe raises unexpectedly is not well.
    """

    async def probe(instance: Instance) -> bool | None:
        try:
            timeout_s = live.current.health_timeout_s
            return await upstream.probe(instance.url + "/health", timeout_s=timeout_s)
        except Overloaded:  # that says nothing of the instance
            return None

    def tell(instance: Instance, well: bool | None) -> None:
        table.probed(instance, well=well)

    question = Question("probes", table.probes_due, probe, False, tell, lambda: TICK_S)
    return Polling(question, background).running()
