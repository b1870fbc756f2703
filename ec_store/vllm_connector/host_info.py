"""Server of the host's memory, as an engine names it on `/metrics` for proxies of other hosts.

The process that serves `/metrics` asks the server, again and again: an engine without requests must
name it too, and after a restart the memory is another one.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from ec_store.arena.connection import ArenaConnection
from ec_store.arena.protocol import Find
from ec_store.arena.url import arena_options
from ec_store.errors import StoreUnavailable

LABELS = ("address", "arena", "tier")

ASK_S = 1.0
"""Time limit of a question, in seconds."""

ASK_EVERY_S = 2.0
"""Time in seconds between two questions."""


class HostInfo:
    """Gauge with the server of the engines in its labels; there is no sample without a server."""

    def __init__(
        self,
        gauge_type: Any,
        labelnames: Sequence[str],
        engines: Iterable[Sequence[object]],
        url: str,
        every_s: float = ASK_EVERY_S,
    ) -> None:
        """Create the gauge for engines, by their labels. They use the store at this URL."""
        self._gauge = gauge_type(
            name="vllm:ec_store_host_info",
            documentation="1 for the server of the host's memory that this engine uses: its "
            "address for proxies, its memory, and the digest of its shared tier's URL.",
            labelnames=[*labelnames, *LABELS],
            multiprocess_mode="mostrecent",
        )
        self._engines = list(engines)
        self._named: Sequence[str] = ()
        if urlsplit(url).scheme == "shm":
            self._connection = ArenaConnection(arena_options(url).path, "proxy", ASK_S)
            self._ask()
            asking = threading.Thread(target=self._ask_again, args=[every_s], name="ec-host")
            asking.daemon = True
            asking.start()

    def _ask_again(self, every_s: float) -> None:
        while True:
            time.sleep(every_s)
            self._ask()

    def _ask(self) -> None:
        """Name the server. One that does not answer stays named: proxies find out by themselves."""
        try:
            _, arena = self._connection.call(Find([]))
        except StoreUnavailable:
            return
        named = [arena.address, arena.name.hex(), arena.tier] if arena.address else []
        if named == self._named:
            return
        for values in self._engines:
            if self._named:
                self._gauge.labels(*values, *self._named).set(0)
            if named:
                self._gauge.labels(*values, *named).set(1)
        self._named = named
