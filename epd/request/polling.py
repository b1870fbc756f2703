"""Periodic requests to every instance while the proxy runs: health, load and namespace."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
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

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Question(Generic[T]):
    """Request to every instance.

    Attributes:
        task: name in the log and in the metric of background tasks.
        due: returns the instances to ask now. Each answer goes to `tell`, exactly once.
        ask: asks one instance. It handles the expected errors.
        unexpected: answer to record for an instance if `ask` raises.
        tell: receives an answer; None if there was no time to ask.
        tick_s: returns the seconds until the next call of `due`.
    """

    task: str
    due: Callable[[], Iterable[Instance]]
    ask: Callable[[Instance], Awaitable[T | None]]
    unexpected: T | None
    tell: Callable[[Instance, T | None], None]
    tick_s: Callable[[], float]


class Polling(Generic[T]):
    """Periodic request to all instances, each in a separate task.

    An unexpected exception costs the instance one answer and does not affect the others. Each one
    is counted. It is logged with its traceback once for each instance and cause.
    """

    def __init__(self, question: Question[T], background: Background) -> None:
        self._question = question
        self._background = background
        self._faults: BoundedDict[Instance, tuple[str, str, int | None]] = BoundedDict(MAX_FAULTS)

    def run_polling(self) -> AbstractAsyncContextManager[None]:
        """Ask in the background until the context exits."""
        return self._background.run_task(self._question.task, self._run)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                for instance in self._question.due():
                    group.create_task(self._ask(instance))
                await asyncio.sleep(self._question.tick_s())

    async def _ask(self, instance: Instance) -> None:
        answer: T | None = None
        try:
            answer = await self._question.ask(instance)
            self._faults.pop(instance, None)
        except Exception as error:  # noqa: BLE001 - every exception is logged and counted
            answer = self._question.unexpected
            self._log_exception(instance, error)
        finally:  # after a cancellation too: an instance without an answer is never due again
            self._question.tell(instance, answer)

    def _log_exception(self, instance: Instance, error: Exception) -> None:
        self._background.count_exception(self._question.task)
        raised = extract_tb(error.__traceback__)[-1]
        cause = type(error).__name__, raised.filename, raised.lineno  # its message may vary
        if self._faults.get(instance) == cause:
            return
        self._faults[instance] = cause
        structlog.get_logger("epd").error(
            "asking an instance failed unexpectedly",
            task=self._question.task,
            instance=instance.url,
            role=instance.role,
            exc_info=error,
        )


TICK_S = 0.25
"""Interval of the check for due probes, in seconds."""


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

    question = Question("probes", table.probes_due, probe, False, record_probe, lambda: TICK_S)
    return Polling(question, background).run_polling()


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

    def due_instances() -> list[Instance]:
        every, interval_s = compared(), config.load_interval_s
        roles = _roles(config, every=every) if interval_s else ()
        return table.reports_due(roles, interval_s, single=every)

    async def ask_load(instance: Instance) -> Report | None:
        page = await _page(instance, upstream, config.health_timeout_s)
        return None if page is None else read_report(page)

    def record_report(instance: Instance, report: Report | None) -> None:
        table.record_report(instance, report, config.load_interval_s or TICK_S)

    def tick_s() -> float:
        return min(config.load_interval_s / 8 or TICK_S, TICK_S)

    question = Question("reports", due_instances, ask_load, None, record_report, tick_s)
    return Polling(question, background).run_polling()


def asking_namespaces(
    namespaces: Namespaces, upstream: Upstream, config: ConfigFields, background: Background
) -> AbstractAsyncContextManager[None]:
    """Ask instances for their namespaces in the background, until the context exits.

    With `load_interval_s` 0, or without a store, no instance is asked.
    """

    def due_instances() -> list[Instance]:
        return namespaces.due_instances() if config.load_interval_s and config.ec_store else []

    async def ask_page(instance: Instance) -> tuple[str, bool] | None:
        page = await _page(instance, upstream, config.health_timeout_s)
        return None if page is None else (read_namespace(page), writes_outputs(page))

    def record_page(instance: Instance, answer: tuple[str, bool] | None) -> None:
        if answer is not None:
            namespace, writes = answer
            namespaces.record_namespace(instance, namespace)
            namespaces.record_writes(instance, writes=writes)

    question = Question("namespaces", due_instances, ask_page, None, record_page, lambda: TICK_S)
    return Polling(question, background).run_polling()


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
