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
            structlog.get_logger("epd").warning(
                f"{self._what}: {self._meanwhile}", **self._fields, reason=reason
            )

    def record_success(self) -> None:
        if self._reason is not None:
            self._reason = None
            structlog.get_logger("epd").info(f"{self._what} again", **self._fields)
