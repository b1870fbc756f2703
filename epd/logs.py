"""Log lines: one per request, for people or for machines.

No media, prompts, keys or URL queries: an event holds none.
"""

import logging
import sys

import structlog

from epd.events import InstanceChanged, RequestDone, StageDone, stage_seconds


def configure(log_format: str, level: str, *, worker: int | None = None) -> None:
    """Set structlog up for this process.

    Args:
        log_format: `console` or `json`.
        level: least level that is logged, such as `info`.
        worker: what each line names as its worker, where there are several.
    """
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    if worker is not None:
        structlog.contextvars.bind_contextvars(worker=worker)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        # A line is one write: several workers share stderr, and print writes the line's end apart.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
    # Else Python writes what libraries warn of as plain text between the lines.
    logging.basicConfig(handlers=[_Relay(logging.WARNING)], force=True)


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
        self._log = structlog.get_logger("epd")
        self._long_s = kv_lease_s / 2

    def stage_done(self, event: StageDone) -> None:
        """One line at level debug."""
        self._log.debug(
            "stage",
            stage=event.stage,
            instance=event.instance,
            seconds=round(event.seconds, 4),
            error=event.error,
        )

    def request_done(self, event: RequestDone) -> None:
        """One line: info, or warning where it failed; routes beside `/v1` at level debug."""
        level = "info" if "/v1/" in event.path else "debug"
        fields: dict[str, float | str | None] = {
            f"{stage}_s": round(seconds, 4)
            for stage, seconds in stage_seconds(event.stages).items()
        }
        if event.items:
            fields["items"] = ",".join(f"{name}={count}" for name, count in event.items.items())
        if event.retries:
            fields["retries"] = event.retries
        if event.degraded:
            fields["degraded"] = ",".join(sorted(event.degraded))
        if event.engine_id != event.request_id:
            fields["engine_id"] = event.engine_id
        if event.kv_wait_s is not None and event.kv_wait_s > self._long_s:
            level = "warning"
            fields["kv_wait_s"] = round(event.kv_wait_s, 4)
        if event.error is not None:
            level = "warning"
            fields |= {"error": event.error, "reason": event.reason}
        self._log.log(
            logging.getLevelName(level.upper()),
            "request",
            request_id=event.request_id,
            method=event.method,
            path=event.path,
            status=event.status,
            seconds=round(event.seconds, 4),
            **fields,
        )

    def instance_changed(self, event: InstanceChanged) -> None:
        """One line: a warning where it is left alone, info where it is back."""
        level = logging.INFO if event.state in {"healthy", "trial"} else logging.WARNING
        self._log.log(
            level, "instance", instance=event.instance, role=event.role, state=event.state
        )
