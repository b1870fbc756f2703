"""Reload of the configuration and of files at SIGHUP.

If one is invalid, the error is logged and the previous content stays in force.
"""

from collections.abc import Callable

import structlog
from aiohttp import web

from epd.config import ConfigInvalid, ProxyConfig
from epd.config.live import LiveConfig
from epd.http.tls import TlsInvalid
from epd.tenants import KeysInvalid


class Reload:
    """Steps of a reload: one for the configuration, and one per file.

    Args:
        succeeded: function called after each reload with whether all steps succeeded.
    """

    def __init__(self, succeeded: Callable[[bool], None]) -> None:
        self._succeeded = succeeded
        self._steps: dict[str, Callable[[], object]] = {}

    def add(self, what: str, step: Callable[[], object]) -> None:
        """Add a step that reloads a file. If it raises, it has changed nothing. It returns None."""
        self._steps[what] = step

    def add_config(self, live: LiveConfig, read: Callable[[], ProxyConfig]) -> None:
        """Add the step that reads the configuration and adopts its changes."""

        def step() -> list[str]:
            change = live.adopt(read())
            if change.kept:
                structlog.get_logger("epd").warning("needs a restart", settings=sorted(change.kept))
            return sorted(change.changed)

        self._steps["configuration"] = step

    def __call__(self) -> None:
        log = structlog.get_logger("epd")
        failed = False
        for what, step in self._steps.items():
            try:
                changed = step()
            except (ConfigInvalid, KeysInvalid, TlsInvalid) as error:
                failed = True
                log.error("not reloaded", what=what, reason=str(error))  # noqa: TRY400 - no bug
            else:
                if changed is None:
                    log.info("reloaded", what=what)
                elif changed:
                    log.info("reloaded", what=what, changed=changed)
        self._succeeded(not failed)


RELOAD = web.AppKey("reload", Reload)
