"""Periodic requests to every instance while the proxy runs: health, load and namespace."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from traceback import extract_tb
from typing import Generic, TypeVar

import structlog

from ec_store.bounded import BoundedDict
from epd.aio import Background
from epd.config.sections import ConfigFields
from epd.config.sections.routing import RouteSettings
from epd.errors import Overloaded, ProxyError
from epd.routing import BalanceName, ItemBalanceName
from epd.routing.instances import ANSWERING, Instance, Role
from epd.routing.namespaces import Namespaces
from epd.routing.reports import Report, read_namespace, read_report, writes_outputs
from epd.routing.table import InstanceTable
from epd.upstream import Upstream

MAX_FAULTS = 1024
"""Upper bound of instances with a remembered last unexpected exception."""

TICK_S = 0.25
"""Interval of the check for due requests, in seconds."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Polling(Generic[T]):
    """Periodic request to all instances, each in a separate task.

    An unexpected exception costs the instance one answer and does not affect the others. Each one
    is counted. It is logged with its traceback once for each instance and cause.

    Attributes:
        task: name in the log and in the metric of background tasks.
        due: returns the instances to ask now. Each answer goes to `tell`, exactly once.
        ask: asks one instance. It handles the expected errors.
        tell: receives an answer; None if there was no time to ask.
        background: runner of the task.
        unexpected: answer to record for an instance if `ask` raises.
        tick_s: interval in which `due` is called, in seconds.
    """

    task: str
    due: Callable[[], Iterable[Instance]]
    ask: Callable[[Instance], Awaitable[T | None]]
    tell: Callable[[Instance, T | None], None]
    background: Background
    unexpected: T | None = None
    tick_s: float = TICK_S
    _faults: BoundedDict[Instance, tuple[str, str, int | None]] = field(
        default_factory=lambda: BoundedDict(MAX_FAULTS)
    )

    def run_polling(self) -> AbstractAsyncContextManager[None]:
        """Ask in the background until the context exits."""
        return self.background.run_task(self.task, self._run)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                for instance in self.due():
                    group.create_task(self._ask(instance))
                await asyncio.sleep(self.tick_s)

    async def _ask(self, instance: Instance) -> None:
        answer: T | None = None
        try:
            answer = await self.ask(instance)
            self._faults.pop(instance, None)
        except Exception as error:  # noqa: BLE001 - every exception is logged and counted
            answer = self.unexpected
            self._log_exception(instance, error)
        finally:  # after a cancellation too: an instance without an answer is never due again
            self.tell(instance, answer)

    def _log_exception(self, instance: Instance, error: Exception) -> None:
        self.background.count_exception(self.task)
        raised = extract_tb(error.__traceback__)[-1]
        cause = type(error).__name__, raised.filename, raised.lineno  # its message may vary
        if self._faults.get(instance) == cause:
            return
        self._faults[instance] = cause
        structlog.get_logger("epd").error(
            "asking an instance failed unexpectedly",
            task=self.task,
            instance=instance.url,
            role=instance.role,
            exc_info=error,
        )


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

    return Polling(
        "probes", table.probes_due, probe, record_probe, background, unexpected=False
    ).run_polling()


MAX_PAGE_BYTES = 4 * 1024**2
"""Maximum size of a page of metrics. vLLM's has some 100 KB for each engine and model."""


def poll_load(
    table: InstanceTable,
    upstream: Upstream,
    config: ConfigFields,
    background: Background,
    compared: Callable[[], bool] = lambda: False,
) -> AbstractAsyncContextManager[None]:
    """Ask for load in the background, every `load_interval_s`, until the context exits.

    `compared` returns whether loads of different roles are compared.
    """
    if not (interval_s := config.load_interval_s):
        return nullcontext()

    def due_instances() -> list[Instance]:
        every = compared()
        return table.reports_due(_roles(config, every=every), interval_s, single=every)

    async def ask_load(instance: Instance) -> Report | None:
        page = await _page(instance, upstream, config.health_timeout_s)
        return None if page is None else read_report(page)

    def record_report(instance: Instance, report: Report | None) -> None:
        table.record_report(instance, report, interval_s)

    tick_s = min(interval_s / 8, TICK_S)
    return Polling(
        "reports", due_instances, ask_load, record_report, background, tick_s=tick_s
    ).run_polling()


def asking_namespaces(
    namespaces: Namespaces, upstream: Upstream, config: ConfigFields, background: Background
) -> AbstractAsyncContextManager[None]:
    """Ask instances for their namespaces in the background, until the context exits.

    With `load_interval_s` 0, or without a store, no instance is asked.
    """
    if not (config.load_interval_s and config.ec_store):
        return nullcontext()

    async def ask_page(instance: Instance) -> tuple[str, bool] | None:
        page = await _page(instance, upstream, config.health_timeout_s)
        return None if page is None else (read_namespace(page), writes_outputs(page))

    def record_page(instance: Instance, answer: tuple[str, bool] | None) -> None:
        if answer is not None:
            namespace, writes = answer
            namespaces.record_namespace(instance, namespace)
            namespaces.record_writes(instance, writes=writes)

    return Polling(
        "namespaces", namespaces.due_instances, ask_page, record_page, background
    ).run_polling()


def _roles(config: RouteSettings, *, every: bool) -> list[Role]:
    """Return the roles that need load reports.

    Without `every`, these are the roles that are balanced by load, and those with engines that may
    hang.
    """
    balances: Mapping[Role, BalanceName | ItemBalanceName] = {
        Role.ENCODE: config.encode_balance,
        Role.PREFILL: config.prefill_balance,
        **dict.fromkeys(ANSWERING, config.decode_balance),
    }
    return [
        role
        for role, name in balances.items()
        if every or name != "round_robin" or role is not Role.ENCODE
    ]


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
