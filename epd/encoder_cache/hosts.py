"""The memories of the instances' hosts: a client of each server that instances name.

Entries, leases and claims belong to a host. The engines of a host share its server, so a proxy has
one connection to it, and one look-up for all of them.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, Self
from urllib.parse import urlsplit

import structlog

from ec_store.arena.remote_store import RemoteArenaStore
from ec_store.arena.remote_url import DEFAULT_PORT, RemoteOptions
from ec_store.bounded import BoundedDict
from ec_store.entry import EntryInfo
from ec_store.keys import EntryKey
from epd.aio import Background
from epd.config.sections.transfers import TransferSettings
from epd.encoder_cache.claims import Claims
from epd.encoder_cache.client import EncoderCache, Operation, Result
from epd.routing.reports import Host

MAX_HOSTS = 1024
"""Upper bound of the servers. Instances of further hosts are served without look-ups."""

logger = structlog.get_logger("epd")


class _Server(NamedTuple):
    store: RemoteArenaStore
    claims: Claims


class HostStores:
    """Clients of the servers, by address. Belongs to one event loop."""

    def __init__(
        self, options: RemoteOptions, config: TransferSettings, background: Background
    ) -> None:
        """Create it without a server; `options` are for all of them, apart from their address."""
        self._options = options
        self._config = config
        self._background = background
        self._servers: dict[str, _Server] = {}
        self._close_tasks: set[asyncio.Task[None]] = set()
        self._ended_operations: Counter[tuple[Operation, Result]] = Counter()
        self._ended_bytes = 0
        self._warnings: BoundedDict[str, str] = BoundedDict(MAX_HOSTS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.use_servers(set())
        await asyncio.gather(*self._close_tasks, return_exceptions=True)

    def use_servers(self, addresses: AbstractSet[str]) -> None:
        """Connect to the servers that instances name, and close all other connections."""
        for address in [address for address in self._servers if address not in addresses]:
            server = self._servers.pop(address)
            cache = server.claims.cache
            self._ended_operations += cache.operations
            self._ended_bytes += cache.found_bytes
            task = asyncio.create_task(cache.close())
            self._close_tasks.add(task)
            task.add_done_callback(self._close_tasks.discard)
        for address in addresses - self._servers.keys():
            options = self._options_of(address)
            if options is not None and len(self._servers) < MAX_HOSTS:
                self._servers[address] = self._connect(options)

    def claims_at(self, host: Host | None) -> Claims | None:
        """Return the claims at the server of a host.

        None: it is unknown, or its memory is not that of the instance: the instance still uses that
        of a server which has ended, or names the address of another host.
        """
        server = None if host is None else self._servers.get(host.address)
        if host is None or server is None:
            return None
        arena = server.store.arena.hex()
        if arena in {"", host.arena}:
            return server.claims
        if self._warnings.get(host.address) != arena:
            self._warnings[host.address] = arena
            logger.warning(
                "the server of an instance's host has another memory than the instance",
                server=host.address,
                next="its entries are not looked up until the instance names this memory",
            )
        return None

    async def find_here(
        self, keys: Mapping[Host, Sequence[EntryKey]]
    ) -> dict[str, Mapping[EntryKey, EntryInfo]]:
        """Return the entries in the memory of each host that answered, by address.

        All are asked at once, without their tiers: each host would begin to copy an entry that only
        one of them needs.
        """

        async def find(host: Host) -> Mapping[EntryKey, EntryInfo] | None:
            claims, here = self.claims_at(host), keys[host]
            if claims is None or not here:
                return None
            store, budget_s = self._servers[host.address].store, self._config.ec_store_budget_s
            infos = await claims.cache.call("lookup", lambda _: store.find_here(here), budget_s)
            return None if infos is None else {info.key: info for info in infos if info is not None}

        results = await asyncio.gather(*(find(host) for host in keys))
        pairs = zip(keys, results, strict=True)
        return {host.address: entries for host, entries in pairs if entries is not None}

    @property
    def caches(self) -> Mapping[str, EncoderCache]:
        """The client of each server, by address."""
        return {address: server.claims.cache for address, server in self._servers.items()}

    @property
    def operations(self) -> Counter[tuple[Operation, Result]]:
        """Number of operations on all servers, by operation and result."""
        counters = [server.claims.cache.operations for server in self._servers.values()]
        return sum(counters, self._ended_operations)

    @property
    def found_bytes(self) -> int:
        """Total size of the entries found."""
        sizes_bytes = [server.claims.cache.found_bytes for server in self._servers.values()]
        return sum(sizes_bytes, self._ended_bytes)

    @property
    def open_circuits(self) -> Mapping[str, bool]:
        """Whether any server is bypassed, by kind of operation."""
        states: dict[str, bool] = {}
        for server in self._servers.values():
            for name, is_open in server.claims.cache.open_circuits.items():
                states[name] = is_open or states.get(name, False)
        return states

    def _connect(self, options: RemoteOptions) -> _Server:
        store = RemoteArenaStore(options)

        async def open_store() -> RemoteArenaStore:
            return store

        cache = EncoderCache(open_store, self._config, self._background)
        cache.start()
        return _Server(store, Claims(cache))

    def _options_of(self, address: str) -> RemoteOptions | None:
        """Return how to connect to a server; None if its connections are less safe than asked.

        None also for an address that is no URL.
        """
        try:
            parts = urlsplit(address)
            port = parts.port or DEFAULT_PORT
        except ValueError:
            return None
        if not parts.hostname or (parts.scheme == "shm+tls") is not self._options.secure:
            if self._warnings.get(address) != parts.scheme:
                self._warnings[address] = parts.scheme
                scheme = "shm+tls" if self._options.secure else "shm+tcp"
                logger.warning(
                    "an instance names a server that --ec-store excludes",
                    server=address,
                    next=f"requests bypass it; --ec-store allows {scheme}:// alone",
                )
            return None
        return self._options.at(parts.hostname, port)
