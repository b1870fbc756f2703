"""Configuration of the log: lines as text or JSON.

Each line that is logged while a request is served bears the request's id.
"""

import logging
import re
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import lru_cache, partial
from io import FileIO
from typing import Any

import orjson
import structlog
from structlog.typing import EventDict

from epd.observe.log_lines import LineLogger, LineWriter

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""ID of the request that is being served, as its client knows it."""

FURTHER = frozenset({"exception", "stack", "exc_info", "logger", "logger_name"})
"""Fields with a form of their own in text lines."""

AMBIGUOUS = re.compile(r"[ \t=\r\n\"']")
"""Characters that make a value be quoted in text lines."""


def configure(log_format: str, level: str, *, worker: int | None = None) -> None:
    """Configure structlog for this process.

    Args:
        log_format: `console` or `json`.
        level: least level that is logged, such as `info`.
        worker: number of this worker, added to each line; None with a single worker.
    """
    processors: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        _of_request,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    if worker is not None:
        processors.append(partial(_named, worker))
    render: Callable[[Any, str, EventDict], Any]
    if log_format == "json":
        render = structlog.processors.JSONRenderer(serializer=orjson.dumps)
    else:
        render = _console(colors=sys.stderr.isatty())
    processors.append(render)
    lines = LineWriter(FileIO(sys.stderr.fileno(), "w", closefd=False))
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=RequestLines(lines, render, worker),
    )
    # Otherwise Python writes the warnings of libraries as plain text between the lines.
    logging.basicConfig(handlers=[_Relay(logging.WARNING)], force=True)


def flush() -> None:
    """Write the lines that wait, as `LineWriter.flush` does."""
    if (lines := request_lines()) is not None:
        lines.writer.flush()


def dropped_lines() -> int:
    """Return the number of lines that this process has dropped."""
    lines = request_lines()
    return 0 if lines is None else lines.writer.dropped


def request_lines() -> "RequestLines | None":
    """Return the renderer of request lines; None if the process has not called `configure`."""
    factory = structlog.get_config()["logger_factory"]
    return factory if isinstance(factory, RequestLines) else None


def hide_locals() -> None:
    """Log tracebacks without local variables where logging is not configured.

    structlog shows local variables by default, among them keys of clients. `configure` is not
    called if another application mounts the proxy. That application's own configuration stays.
    """
    if structlog.is_configured():
        return
    *others, render = structlog.get_config()["processors"]
    if isinstance(render, structlog.dev.ConsoleRenderer):
        render = structlog.dev.ConsoleRenderer(
            colors=sys.stdout.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    structlog.configure(processors=[*others, render])


class RequestLines:
    """Renderer of request lines that bypasses structlog's chain, which takes longer than the rest.

    It is also structlog's logger factory, so that all lines go through the same writer.
    """

    def __init__(
        self, writer: LineWriter, render: Callable[[Any, str, EventDict], Any], worker: int | None
    ) -> None:
        self.writer = writer
        self._render = render
        self._named = {} if worker is None else {"worker": worker}

    def __call__(self, *_: object) -> LineLogger:
        return LineLogger(self.writer)

    def write(self, fields: Callable[[], EventDict]) -> None:
        """Write a line of level info, with the fields that `fields` returns."""
        self.writer.write(partial(self._rendered, time.time_ns(), fields))

    def _rendered(self, now_ns: int, fields: Callable[[], EventDict]) -> str | bytes:
        second, fraction = divmod(now_ns // 1000, 1_000_000)
        when = f"{_date(second)}.{fraction:06d}Z"
        event = {**fields(), **self._named, "event": "request", "level": "info", "timestamp": when}
        line: str | bytes = self._render(None, "info", event)
        return line


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).isoformat().removesuffix("+00:00")


def _of_request(_: Any, __: str, event: EventDict) -> EventDict:
    if (request_id := REQUEST_ID.get()) is not None:
        event.setdefault("request_id", request_id)
    return event


def _named(worker: int, _: Any, __: str, event: EventDict) -> EventDict:
    event.setdefault("worker", worker)
    return event


def _console(*, colors: bool) -> structlog.typing.Processor:
    # Fields keep the order of the call, so that the most important ones are not at the far right.
    full = structlog.dev.ConsoleRenderer(colors=colors, sort_keys=False)
    return full if colors else partial(plain_line, full)


def plain_line(
    full: structlog.dev.ConsoleRenderer, logger: Any, method: str, event: EventDict
) -> str:
    """Return the text line that `full` renders without colors, in a tenth of its time.

    There is a line for each request. Events with more than a level, a text and fields are passed to
    `full`.
    """
    if not FURTHER.isdisjoint(event):
        return full(logger, method, event)
    when, level, text = event.pop("timestamp"), event.pop("level"), event.pop("event")
    search = AMBIGUOUS.search
    fields = " ".join(
        [
            f"{name}={value}"
            if isinstance(value, str) and not search(value)
            else f"{name}={value!r}"
            for name, value in event.items()
        ]
    )
    return f"{when} [{level:<9}] {text:<30} {fields}".rstrip(" ")


class _Relay(logging.Handler):
    """Handler that writes the log records of libraries in the format of the proxy's lines."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger("epd")
        log.log(record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info)
