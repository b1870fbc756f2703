"""DNS lookups of all addresses of a name."""

from collections.abc import Awaitable, Callable
from functools import cached_property

import dns.asyncresolver
import dns.exception
import dns.resolver

from epd.http.http1 import is_address
from epd.routing.urls import name_server

LookUp = Callable[[str], Awaitable[frozenset[str]]]
"""Returns all addresses of a name; an empty set if it has none. Raises `LookUpFailed`."""


class LookUpFailed(Exception):
    """A name lookup failed."""


TIMEOUT_S = 3.0
"""Timeout of a lookup with all its retries."""


class DnsNames:
    """Resolves names, with the search domains of the machine."""

    def __init__(self, server: str | None = None) -> None:
        """Use one server, `address` or `address:port`; without it those of the machine."""
        self._server = server

    async def resolve_addresses(self, host: str) -> frozenset[str]:
        """Return all IPv4 addresses of a name, or else all its IPv6 addresses.

        Not both: an instance with one of each would count twice.

        Raises:
            LookUpFailed: the servers did not answer, or answered with an error.
        """
        if is_address(host):
            return frozenset({host})
        return await self._resolve_host(host, "A") or await self._resolve_host(host, "AAAA")

    async def _resolve_host(self, host: str, kind: str) -> frozenset[str]:
        try:
            answer = await self._resolver.resolve(host, kind, search=True, raise_on_no_answer=False)
        except dns.resolver.NXDOMAIN:
            return frozenset()
        except dns.exception.DNSException as error:
            raise LookUpFailed(type(error).__name__) from error
        return frozenset(str(record) for record in answer.rrset or ())

    @cached_property
    def _resolver(self) -> dns.asyncresolver.Resolver:
        """The resolver, created at first use: the machine may get name servers later.

        Raises:
            NoResolverConfiguration: it has none yet; the next use tries again.
        """
        resolver = dns.asyncresolver.Resolver(configure=self._server is None)
        resolver.lifetime = TIMEOUT_S
        if self._server is not None:
            address, resolver.port = name_server(self._server)
            resolver.nameservers = [address]
        return resolver
