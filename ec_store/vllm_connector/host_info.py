"""Server of the host's memory, as an engine names it on `/metrics` for proxies of other hosts.

The process that serves `/metrics` asks the server, again and again: an engine without requests must
name it too, and after a restart the memory is another one.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from ec_store.arena.connection import ArenaConnection
from ec_store.arena.protocol import Find
from ec_store.arena.url import arena_options
from ec_store.engine.threads import PeriodicThread
from ec_store.errors import StoreUnavailable

logger = logging.getLogger("vllm.ec_store")

LABELS = ("address", "arena", "tier")

ASK_S = 1.0
"""Time limit of a question, in seconds."""


class HostInfo:
    """Gauge with the server of the engines in its labels; there is no sample without a server."""

    def __init__(
        self,
        make_gauge: Callable[..., Any],
        labelnames: Sequence[str],
        engines: Iterable[Sequence[object]],
        url: str,
    ) -> None:
        """Create the gauge for engines, by their labels. They use the store at this URL."""
        self._gauge = make_gauge(
            name="vllm:ec_store_host_info",
            documentation="1 for the server of the host's memory that this engine uses: its "
            "address for proxies, its memory, and the digest of its shared tier's URL.",
            labelnames=[*labelnames, *LABELS],
        )
        self._engines = list(engines)
        self._named: Sequence[str] = ()
        if urlsplit(url).scheme == "shm":
            self._connection = ArenaConnection(arena_options(url).path, "proxy", ASK_S)
            self._ask()
            try:
                PeriodicThread(self._ask).start()
            except RuntimeError as error:
                logger.warning("the server of the host's memory is not asked again: %s", error)

    def _ask(self) -> bool:
        """Name the server, and return False: it is asked again after a while.

        A server that does not answer stays named: proxies find out by themselves.
        """
        try:
            _, arena = self._connection.call(Find([]))
        except StoreUnavailable:
            return False
        named = [arena.address, arena.name.hex(), arena.tier] if arena.address else []
        if named == self._named:
            return False
        for values in self._engines:
            if self._named:
                self._gauge.labels(*values, *self._named).set(0)
            if named:
                self._gauge.labels(*values, *named).set(1)
        self._named = named
        return False
