"""Observer that logs: a line for each request of a client, and for each change of an instance.

The lines contain no media, prompts, keys or URL queries, because events contain none.
"""

import logging
from collections.abc import Sequence
from functools import cached_property, partial

import structlog

from epd.api.endpoints import is_api
from epd.config.sections import ConfigFields
from epd.errors import Stage
from epd.events import InstanceChanged, RequestRecord, StageDone, stage_seconds
from epd.observe.logs import RequestLines, request_lines

MAX_FAILURES = 8
"""Upper bound of the failed upstream requests that a request's line names."""

NEXT = {
    "ejected": "no requests until the ejection expires, then one on trial",
    "down": "no requests until a probe succeeds",
    "trial": "one request at a time, until one succeeds",
    "healthy": "requests as to all other instances",
    "added": "requests as to all other instances",
    "removed": "no new requests; running ones end normally",
    "refused": "joins when it no longer conflicts with another instance or with its own kv_addr",
}
"""Consequence of each change of an instance, for the log."""

SERVING = frozenset[Stage]({"prefill", "decode"})
"""Stages with an instance that the line of a request names."""

Fields = dict[str, float | str | None]

EXPECTED = frozenset({"healthy", "trial", "added", "removed"})
"""States of an instance that need no action by an operator."""

PROBES = ("/ready", "/ping")
"""Paths that load balancers request every few seconds."""


class LogObserver:
    """Observer that logs each client request, and at level debug each upstream request."""

    def __init__(self, config: ConfigFields) -> None:
        self._config = config
        self._probe_errors: dict[str, str | None] = {}

    @cached_property
    def _log(self) -> structlog.typing.FilteringBoundLogger:
        """Logger as configured at the first event. To look it up costs more than a line."""
        log: structlog.typing.FilteringBoundLogger = structlog.get_logger("epd").bind()
        return log

    @cached_property
    def _lines(self) -> RequestLines | None:
        return request_lines()

    def stage_done(self, event: StageDone) -> None:
        """Log a line at level debug, or a warning if prefill's blocks were not released."""
        lost = event.stage == "release" and event.error is not None
        if not lost and not self._log.is_enabled_for(logging.DEBUG):
            return
        level = logging.WARNING if lost else logging.DEBUG
        more = {"next": "prefill keeps its blocks until their lease expires"} if lost else {}
        self._log.log(
            level,
            "stage",
            stage=event.stage,
            instance=event.instance,
            seconds=round(event.seconds, 4),
            error=event.error,
            **more,
        )

    def request_done(self, event: RequestRecord) -> None:
        """Log one line: info, a warning after a failure, and debug outside of the API.

        Of readiness probes, those with another result than the one before are logged.
        """
        failures = _failures(event)
        level = self._level(event, failed=bool(failures))
        if not self._log.is_enabled_for(level):
            return
        fields = partial(self._fields, event, failures)
        if level == logging.INFO and self._lines is not None:
            self._lines.write(fields)
        else:
            self._log.log(level, "request", **fields())

    def _fields(self, event: RequestRecord, failures: Sequence[str]) -> Fields:
        fields: Fields = {"status": event.status, "seconds": round(event.seconds, 4)}
        if event.error is not None:
            fields["error"] = event.error
            if event.reason is not None:
                fields["reason"] = event.reason
        fields["method"], fields["path"] = event.method, event.path
        _add_served(fields, event)
        self._add_course(fields, event)
        if failures:
            fields["failures"] = ",".join(failures)
        self._add_names(fields, event)
        return fields

    def _level(self, event: RequestRecord, *, failed: bool) -> int:
        if event.path in PROBES:
            before = self._probe_errors.get(event.path)
            self._probe_errors[event.path] = event.error
            if event.error == before:
                return logging.DEBUG
            if event.error is None:
                return logging.INFO
        if failed or event.error is not None or self._is_long_wait(event):
            return logging.WARNING
        return logging.INFO if is_api(event.path) else logging.DEBUG

    def _is_long_wait(self, event: RequestRecord) -> bool:
        return event.kv_wait_s is not None and event.kv_wait_s > self._config.kv_lease_s / 2

    def _add_course(self, fields: Fields, event: RequestRecord) -> None:
        """Add the time of each stage, and what differed from the usual course."""
        for stage, seconds in stage_seconds(event.stages).items():
            fields[f"{stage}_s"] = round(seconds, 4)
        if event.items:
            fields["items"] = ",".join(f"{name}={count}" for name, count in event.items.items())
        if event.placements:
            fields["encode_decisions"] = ",".join(
                f"{decision}:{reason}={count}"
                for (decision, reason), count in event.placements.items()
            )
        if event.prefix_tokens is not None:
            fields["prefix_tokens"] = event.prefix_tokens
        if event.retries:
            fields["retries"] = event.retries
        if event.policy is not None:
            fields["policy"] = event.policy
        if event.degraded:
            fields["degraded"] = ",".join(sorted(event.degraded))
        if event.kv_wait_s is not None and self._is_long_wait(event):
            fields["kv_wait_s"] = round(event.kv_wait_s, 4)

    def _add_names(self, fields: Fields, event: RequestRecord) -> None:
        fields["request_id"] = event.request_id
        if event.engine_id != event.request_id:
            fields["engine_id"] = event.engine_id
        if event.trace_id is not None:
            fields["trace_id"] = event.trace_id

    def instance_changed(self, event: InstanceChanged) -> None:
        """Log one line: a warning if the state needs action by an operator, otherwise info."""
        level = logging.INFO if event.state in EXPECTED else logging.WARNING
        named = {} if event.source is None else {"source": event.source}
        if event.cause:
            named["cause"] = event.cause
        self._log.log(
            level,
            f"instance {event.state}",
            state=event.state,
            role=event.role,
            instance=event.instance,
            **named,
            next=NEXT[event.state],
        )


def _add_served(fields: Fields, event: RequestRecord) -> None:
    """Add the instances that answered, and the sizes of their answers.

    Of several successful prefills or decodes, the last one is named. Encode instances are not
    named, because a request may have one for each item.
    """
    if event.model_name:
        fields["model"] = event.model_name
    if event.stream:
        fields["stream"] = True
        if event.first_token_s is not None:
            fields["ttft_s"] = round(event.first_token_s, 4)
    for stage in event.stages:
        if stage.error is None and stage.stage in SERVING:
            fields[stage.stage] = stage.instance
    if event.answer_bytes:
        fields["answer_bytes"] = event.answer_bytes


def _failures(event: RequestRecord) -> list[str]:
    failed = [
        f"{stage.stage}@{stage.instance}={stage.error}"
        for stage in event.stages
        if stage.error is not None and stage.error != "cancelled"
    ]
    return failed[:MAX_FAILURES]
