"""Log lines: one per request, for people or for machines.

No media, prompts, keys or URL queries: an event holds none. What is logged while a request
is served, by whomever, bears its id.
"""

import logging
import re
import sys
from contextvars import ContextVar
from functools import cached_property, partial
from typing import Any

import orjson
import structlog
from structlog.typing import EventDict

from epd.events import InstanceChanged, RequestDone, StageDone, stage_seconds

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Of the request that is being served, as its client knows it."""

MAX_FAILURES = 8
"""Failed requests to instances that a request's line names."""

NEXT = {
    "ejected": "no request until its time is over, then one on trial",
    "down": "no request until a probe is answered, then one on trial",
    "trial": "one request at a time, until one is answered",
    "healthy": "requests as to all others",
    "added": "requests as to all others",
    "removed": "no request; those that run end as they would",
    "refused": "comes in when nothing is in its way any more: another's role, its own kv_addr",
}
"""What comes of an instance that has changed, for who reads of it."""

FURTHER = frozenset({"exception", "stack", "exc_info", "logger", "logger_name"})
"""Fields that a line for people has a form of its own for."""
EXPECTED = frozenset({"healthy", "trial", "added", "removed"})
"""What an instance may become without an operator having to look."""
AMBIGUOUS = re.compile(r"[ \t=\r\n\"']")
"""What is quoted in a line for people."""


def configure(log_format: str, level: str, *, worker: int | None = None) -> None:
    """Set structlog up for this process.

    Args:
        log_format: `console` or `json`.
        level: least level that is logged, such as `info`.
        worker: what each line names as its worker, where there are several.
    """
    processors: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        _of_request,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    if worker is not None:
        processors.append(partial(_named, worker))
    # A line is one write: several workers share stderr, and print writes the line's end apart.
    factory: structlog.WriteLoggerFactory | structlog.BytesLoggerFactory
    if log_format == "json":
        processors.append(structlog.processors.JSONRenderer(serializer=orjson.dumps))
        factory = structlog.BytesLoggerFactory(sys.stderr.buffer)
    else:
        processors.append(_console(colors=sys.stderr.isatty()))
        factory = structlog.WriteLoggerFactory(sys.stderr)
    structlog.configure(
        processors=processors,
        wrapper_class=_at(level),
        logger_factory=factory,
    )
    # Else Python writes what libraries warn of as plain text between the lines.
    logging.basicConfig(handlers=[_Relay(logging.WARNING)], force=True)


def set_level(level: str) -> None:
    """Log from this level on; `configure` has been called."""
    structlog.configure(**{**structlog.get_config(), "wrapper_class": _at(level)})


def _at(level: str) -> type[structlog.typing.FilteringBoundLogger]:
    return structlog.make_filtering_bound_logger(logging.getLevelName(level.upper()))


def _of_request(_: Any, __: str, event: EventDict) -> EventDict:
    """Say in whose service it was written."""
    if (request_id := REQUEST_ID.get()) is not None:
        event.setdefault("request_id", request_id)
    return event


def _named(worker: int, _: Any, __: str, event: EventDict) -> EventDict:
    """Say whose line it is."""
    event.setdefault("worker", worker)
    return event


def _console(*, colors: bool) -> structlog.typing.Processor:
    """A renderer for people."""
    full = structlog.dev.ConsoleRenderer(colors=colors)
    return full if colors else partial(plain, full)


def plain(full: structlog.dev.ConsoleRenderer, logger: Any, method: str, event: EventDict) -> str:
    """What `full` makes of an event, without colors; at a tenth of what that takes.

    There is a line for each request. What has more than a level, a text and fields is left to it.
    """
    if not FURTHER.isdisjoint(event):
        return full(logger, method, event)
    time, level, text = event.pop("timestamp"), event.pop("level"), event.pop("event")
    fields = " ".join([f"{name}={_shown(event[name])}" for name in sorted(event)])
    return f"{time} [{level:<9}] {text:<30} {fields}".rstrip(" ")


def _shown(value: object) -> str:
    return value if isinstance(value, str) and not AMBIGUOUS.search(value) else repr(value)


class _Relay(logging.Handler):
    """Passes on what libraries log, to be written as our own lines are."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger("epd")
        log.log(record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info)


class LogObserver:
    """Logs each client's request, and each request to an instance at level debug."""

    def __init__(self, kv_lease_s: float) -> None:
        """Log from now on.

        Args:
            kv_lease_s: how long prefill keeps its blocks; what takes half of it is a warning.
        """
        self._long_s = kv_lease_s / 2

    def adopt(self, kv_lease_s: float) -> None:
        """Go by another lease, and by the level that logging has now."""
        self._long_s = kv_lease_s / 2
        self.__dict__.pop("_log", None)

    @cached_property
    def _log(self) -> structlog.typing.FilteringBoundLogger:
        """As configured when the first event comes; to look that up costs more than a line."""
        log: structlog.typing.FilteringBoundLogger = structlog.get_logger("epd").bind()
        return log

    def stage_done(self, event: StageDone) -> None:
        """One line at level debug; a warning where prefill's blocks were not given back."""
        lost = event.stage == "release" and event.error is not None
        level = logging.WARNING if lost else logging.DEBUG
        if not self._log.is_enabled_for(level):
            return
        more = {"next": "prefill keeps its blocks until their lease ends"} if lost else {}
        self._log.log(
            level,
            "stage",
            stage=event.stage,
            instance=event.instance,
            seconds=round(event.seconds, 4),
            error=event.error,
            **more,
        )

    def request_done(self, event: RequestDone) -> None:
        """One line: info, a warning where it or an instance failed; beside `/v1` at level debug."""
        level = self._level(event)
        if not self._log.is_enabled_for(level):
            return
        self._log.log(
            level,
            "request",
            request_id=event.request_id,
            method=event.method,
            path=event.path,
            status=event.status,
            seconds=round(event.seconds, 4),
            **self._fields(event),
        )

    def _level(self, event: RequestDone) -> int:
        if event.error is not None or self._waited_long(event) or _failures(event):
            return logging.WARNING
        return logging.INFO if "/v1/" in event.path else logging.DEBUG

    def _waited_long(self, event: RequestDone) -> bool:
        return event.kv_wait_s is not None and event.kv_wait_s > self._long_s

    def _fields(self, event: RequestDone) -> dict[str, float | str | None]:
        """What is not said of each request."""
        fields: dict[str, float | str | None] = {
            f"{stage}_s": round(seconds, 4)
            for stage, seconds in stage_seconds(event.stages).items()
        }
        if event.items:
            fields["items"] = ",".join(f"{name}={count}" for name, count in event.items.items())
        if event.retries:
            fields["retries"] = event.retries
        if event.policy is not None:
            fields["policy"] = event.policy
        if event.degraded:
            fields["degraded"] = ",".join(sorted(event.degraded))
        if event.engine_id != event.request_id:
            fields["engine_id"] = event.engine_id
        if event.trace_id is not None:
            fields["trace_id"] = event.trace_id
        if event.kv_wait_s is not None and self._waited_long(event):
            fields["kv_wait_s"] = round(event.kv_wait_s, 4)
        if failures := _failures(event):
            fields["failures"] = ",".join(failures)
        if event.error is not None:
            fields |= {"error": event.error, "reason": event.reason}
        return fields

    def instance_changed(self, event: InstanceChanged) -> None:
        """One line: a warning where it is left alone, info where it is back, comes or goes."""
        level = logging.INFO if event.state in EXPECTED else logging.WARNING
        named = {} if event.source is None else {"source": event.source}
        self._log.log(
            level,
            "instance",
            instance=event.instance,
            role=event.role,
            state=event.state,
            **named,
            next=NEXT[event.state],
        )


def _failures(event: RequestDone) -> list[str]:
    """Which instance failed at what, and how; the first ones."""
    failed = [
        f"{one.stage}@{one.instance}={one.error}"
        for one in event.stages
        if one.error is not None and one.error != "cancelled"
    ]
    return failed[:MAX_FAILURES]
