"""What is read anew while the process runs, at SIGHUP.

What cannot be used is logged, and what was there before stays in force.
"""

from collections.abc import Callable

import structlog
from aiohttp import web

from epd.http.tls import TlsInvalid
from epd.tenants import KeysInvalid


class Reload:
    """Reads files anew.

    Args:
        succeeded: told after each time whether all of them could be used.
    """

    def __init__(self, succeeded: Callable[[bool], None]) -> None:
        self._succeeded = succeeded
        self._steps: dict[str, Callable[[], None]] = {}

    def add(self, what: str, step: Callable[[], None]) -> None:
        """Have `step` read a file: it changes nothing where it raises."""
        self._steps[what] = step

    def __call__(self) -> None:
        """Read all of them."""
        log = structlog.get_logger("epd")
        failed = False
        for what, step in self._steps.items():
            try:
                step()
            except (KeysInvalid, TlsInvalid) as error:
                failed = True
                log.error("not reloaded", what=what, reason=str(error))  # noqa: TRY400 - no bug
            else:
                log.info("reloaded", what=what)
        self._succeeded(not failed)


RELOAD = web.AppKey("reload", Reload)
