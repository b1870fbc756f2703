"""A periodic question to every instance, while the proxy runs."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from traceback import extract_tb
from typing import Generic, TypeVar

import structlog

from ec_store.bounded import BoundedDict
from epd.background import Background
from epd.routing.instances import Instance

MAX_FAULTS = 1024
"""Upper bound of instances with a remembered last unexpected exception."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Question(Generic[T]):
    """A question to instances.

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
    """Asks one question of all instances, each in a task of its own.

    An unexpected exception costs the instance one answer and does not affect the others. Each one
    is counted. It is logged with its traceback once for each instance and cause.
    """

    def __init__(self, question: Question[T], background: Background) -> None:
        self._question = question
        self._background = background
        self._faults: BoundedDict[Instance, tuple[str, str, int | None]] = BoundedDict(MAX_FAULTS)

    def running(self) -> AbstractAsyncContextManager[None]:
        """Ask in the background until the context exits."""
        return self._background.running(self._question.task, self._run)

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
            self._note(instance, error)
        finally:  # after a cancellation too: an instance without an answer is never due again
            self._question.tell(instance, answer)

    def _note(self, instance: Instance, error: Exception) -> None:
        self._background.failed(self._question.task)
        cause = _cause(error)
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


def _cause(error: Exception) -> tuple[str, str, int | None]:
    """Return the type of the error and where it was raised. Its message may vary."""
    raised = extract_tb(error.__traceback__)[-1]
    return type(error).__name__, raised.filename, raised.lineno
