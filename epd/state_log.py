"""Logging of a repeating failure: once at its start, and once at its end."""

import structlog


class StateLog:
    """Logs when something cannot be used, why, and when it can be used again."""

    def __init__(
        self, subject: str, meanwhile: str = "the known instances stay in use", **fields: str
    ) -> None:
        self._subject = subject
        self._meanwhile = meanwhile
        self._fields = fields
        self._reason: str | None = None

    def record_failure(self, reason: str) -> None:
        """Record a failure; log it if the reason is new."""
        if reason != self._reason:
            self._reason = reason
            event = f"{self._subject} cannot be used: {self._meanwhile}"
            structlog.get_logger("epd").warning(event, **self._fields, reason=reason)

    def record_success(self) -> None:
        if self._reason is not None:
            self._reason = None
            event = f"{self._subject} can be used again"
            structlog.get_logger("epd").info(event, **self._fields)
