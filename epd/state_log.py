"""Logging of a repeating failure: once at its start, and once at its end."""

import structlog


class StateLog:
    """Logs when something begins to fail, when the reason changes, and when it works again."""

    def __init__(
        self, what: str, meanwhile: str = "the known instances stay in use", **fields: str
    ) -> None:
        self._what = what
        self._meanwhile = meanwhile
        self._fields = fields
        self._reason: str | None = None

    def record_failure(self, reason: str) -> None:
        """Record a failure; log it if the reason is new."""
        if reason != self._reason:
            self._reason = reason
            self._log.warning(f"{self._what}: {self._meanwhile}", reason=reason)

    def record_success(self) -> None:
        """Record a success; log the end of a failure."""
        if self._reason is not None:
            self._reason = None
            self._log.info(f"{self._what} again")

    @property
    def _log(self) -> structlog.typing.FilteringBoundLogger:
        log: structlog.typing.FilteringBoundLogger = structlog.get_logger("epd").bind(
            **self._fields
        )
        return log
