"""Server of the host's memory, as an engine names it on `/metrics` for proxies of other hosts.

The process that serves `/metrics` asks the server when it starts. Later the scheduler names the
server that it is connected to: after a restart, the memory is another one.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from ec_store.arena.connection import ArenaConnection, MappedArena
from ec_store.arena.protocol import Find
from ec_store.arena.url import arena_options
from ec_store.errors import StoreUnavailable

HOST = "host"
"""Name under which the scheduler's server is sent with the metrics: the values of `LABELS`."""

LABELS = ("address", "arena", "tier")

ASK_S = 1.0
"""Time in seconds for the first question. Without an answer, the scheduler's first step tells."""


def host_of(arena: MappedArena | None) -> list[str] | None:
    """Return the server of a memory; None if it is lost, or serves no other hosts."""
    if arena is None or not arena.address:
        return None
    return [arena.address, arena.name.hex(), arena.tier]


def ask_host(url: str) -> list[str] | None:
    """Return the server of the memory at a URL; None without one, as of other stores."""
    if urlsplit(url).scheme != "shm":
        return None
    connection = ArenaConnection(arena_options(url).path, "proxy", ASK_S)
    try:
        return host_of(connection.call(Find([]))[1])
    except StoreUnavailable:
        return None
    finally:
        connection.close()


class HostInfo:
    """Gauge with the server of each engine in its labels; engines without one have no sample."""

    def __init__(
        self,
        gauge_type: Any,
        labelnames: Sequence[str],
        engines: Mapping[int, Sequence[object]],
        host: list[str] | None,
    ) -> None:
        """Create the gauge for engines, by number with their labels, and publish a server."""
        self._gauge = gauge_type(
            name="vllm:ec_store_host_info",
            documentation="1 for the server of the host's memory that this engine uses: its "
            "address for proxies, its memory, and the digest of its shared tier's URL.",
            labelnames=[*labelnames, *LABELS],
            multiprocess_mode="mostrecent",
        )
        self._engines = engines
        self._published: dict[int, list[str]] = {}
        for engine in engines:
            if host is not None:
                self.publish(host, engine)

    def publish(self, host: list[str], engine: int) -> None:
        """Publish the server of an engine in place of an earlier one."""
        before = self._published.get(engine)
        if host == before:
            return
        if before is not None:
            self._gauge.labels(*self._engines[engine], *before).set(0)
        self._gauge.labels(*self._engines[engine], *host).set(1)
        self._published[engine] = host
