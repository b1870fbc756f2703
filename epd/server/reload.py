"""What is read anew while the process runs, at SIGHUP.

What cannot be used is logged, and what was there before stays in force.
"""

from collections.abc import Callable

import structlog
from aiohttp import web

from epd.config import ConfigInvalid, ProxyConfig
from epd.config.live import LiveConfig
from epd.http.tls import TlsInvalid
from epd.tenants import KeysInvalid


class Reload:
    """Reads the configuration and files anew.

    Args:
        succeeded: told after each time whether all of them could be used.
    """

    def __init__(self, succeeded: Callable[[bool], None]) -> None:
        self._succeeded = succeeded
        self._steps: dict[str, Callable[[], object]] = {}

    def add(self, what: str, step: Callable[[], object]) -> None:
        """Have `step` read a file: it changes nothing where it raises, and returns None."""
        self._steps[what] = step

    def add_config(self, live: LiveConfig, read: Callable[[], ProxyConfig]) -> None:
        """Have the configuration read, and what has changed of it taken over."""

        def step() -> list[str]:
            change = live.adopt(read())
            if change.kept:
                structlog.get_logger("epd").warning("needs a restart", settings=sorted(change.kept))
            return sorted(change.changed)

        self._steps["configuration"] = step

    def __call__(self) -> None:
        """Read all of them."""
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
