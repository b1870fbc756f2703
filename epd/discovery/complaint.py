"""What goes wrong again and again, said once."""

import structlog


class Complaint:
    """Logs when something begins to fail, when it fails otherwise, and when it is well again."""

    def __init__(
        self, what: str, meanwhile: str = "what was known before stays", **fields: str
    ) -> None:
        self._what = what
        self._meanwhile = meanwhile
        self._fields = fields
        self._reason: str | None = None

    def failed(self, reason: str) -> None:
        """It does not work."""
        if reason != self._reason:
            self._reason = reason
            self._log.warning(f"{self._what}: {self._meanwhile}", reason=reason)

    def well(self) -> None:
        """It works."""
        if self._reason is not None:
            self._reason = None
            self._log.info(f"{self._what} again")

    @property
    def _log(self) -> structlog.typing.FilteringBoundLogger:
        log: structlog.typing.FilteringBoundLogger = structlog.get_logger("epd").bind(
            **self._fields
        )
        return log
