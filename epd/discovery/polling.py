"""Periodic requests to every instance while the proxy runs: health, load and namespace."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from traceback import extract_tb
from typing import NamedTuple, TypeVar

import structlog

from ec_store.bounded import BoundedDict
from epd.aio import Background
from epd.config.sections import ConfigFields
from epd.errors import Overloaded, ProxyError
from epd.routing.instances import Instance
from epd.routing.reports import Host, Report, read_host, read_namespace, read_report, writes_outputs
from epd.routing.store_access import StoreAccess
from epd.routing.table import InstanceTable
from epd.upstream import Upstream

MAX_FAULTS = 1024
"""Upper bound of instances with a remembered last unexpected exception."""

TICK_S = 0.25
"""Interval of the check for due requests, in seconds."""

T = TypeVar("T")


def poll_instances(  # noqa: PLR0913 - its callbacks
    task: str,
    due: Callable[[], Iterable[Instance]],
    ask: Callable[[Instance], Awaitable[T | None]],
    tell: Callable[[Instance, T | None], None],
    background: Background,
    *,
    unexpected: T | None = None,
    tick_s: float = TICK_S,
) -> AbstractAsyncContextManager[None]:
    """Ask instances in the background until the context exits, each in a separate task.

    An unexpected exception costs the instance one answer and does not affect the others. Each one
    is counted. It is logged with its traceback once for each instance and cause.

    Args:
        task: name in the log and in the metric of background tasks.
        due: returns the instances to ask now. Each answer goes to `tell`, exactly once.
        ask: asks one instance. It handles the expected errors.
        tell: receives an answer; None if there was no time to ask.
        background: runner of the task.
        unexpected: answer to record for an instance if `ask` raises.
        tick_s: interval in which `due` is called, in seconds.
    """
    causes: BoundedDict[Instance, tuple[str, str, int | None]] = BoundedDict(MAX_FAULTS)

    async def ask_one(instance: Instance) -> None:
        answer: T | None = None
        try:
            answer = await ask(instance)
            causes.pop(instance, None)
        except Exception as error:  # noqa: BLE001 - every exception is logged and counted
            answer = unexpected
            background.count_exception(task)
            raised = extract_tb(error.__traceback__)[-1]
            cause = type(error).__name__, raised.filename, raised.lineno  # its message may vary
            if causes.get(instance) != cause:
                causes[instance] = cause
                structlog.get_logger("epd").error(
                    "asking an instance failed unexpectedly",
                    task=task,
                    instance=instance.url,
                    role=instance.role,
                    exc_info=error,
                )
        finally:  # after a cancellation too: an instance without an answer is never due again
            tell(instance, answer)

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                for instance in due():
                    group.create_task(ask_one(instance))
                await asyncio.sleep(tick_s)

    return background.run_task(task, run)


def probe_periodically(
    table: InstanceTable, upstream: Upstream, config: ConfigFields, background: Background
) -> AbstractAsyncContextManager[None]:
    """Probe instances in the background when they are due, until the context exits.

    An unexpected exception counts as a failed probe.
    """

    async def probe(instance: Instance) -> bool | None:
        try:
            timeout_s = config.health_timeout_s
            return await upstream.probe(instance.url + "/health", timeout_s=timeout_s)
        except Overloaded:  # the proxy's own limit, not the instance's health
            return None

    def record_probe(instance: Instance, well: bool | None) -> None:
        table.record_probe(instance, well=well)

    return poll_instances(
        "probes", table.probes_due, probe, record_probe, background, unexpected=False
    )


MAX_PAGE_BYTES = 4 * 1024**2
"""Maximum size of a page of metrics. vLLM's has some 100 KB for each engine and model."""


class _MetricsPage(NamedTuple):
    report: Report | None
    namespace: str
    writes_outputs: bool
    host: Host | None


def poll_metrics(  # noqa: PLR0913 - what it reports to
    table: InstanceTable,
    access: StoreAccess,
    upstream: Upstream,
    config: ConfigFields,
    background: Background,
    *,
    note_page: Callable[[str, bytes], None] = lambda *_: None,
) -> AbstractAsyncContextManager[None]:
    """Ask for metrics in the background, every `load_interval_s`, until the context exits.

    `note_page` gets each page that was read, with the URL of its instance.
    """
    if not (interval_s := config.load_interval_s):
        return nullcontext()

    def due_instances() -> list[Instance]:
        return table.reports_due(interval_s)

    async def ask_page(instance: Instance) -> _MetricsPage | None:
        page = await _page(instance, upstream, config.health_timeout_s)
        if page is None:
            return None
        note_page(instance.url, page)
        return _MetricsPage(
            read_report(page), read_namespace(page), writes_outputs(page), read_host(page)
        )

    def record_page(instance: Instance, page: _MetricsPage | None) -> None:
        table.record_report(instance, page and page.report, interval_s)
        if page is not None and config.ec_store is not None:
            access.record_namespace(instance, page.namespace)
            access.record_writes(instance, writes=page.writes_outputs)
            access.record_host(instance, page.host)

    tick_s = min(interval_s / 8, TICK_S)
    return poll_instances(
        "reports", due_instances, ask_page, record_page, background, tick_s=tick_s
    )


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
