"""Addresses of names, as the DNS gives them: all of them, and none where there are none."""

import dns.asyncresolver
import dns.exception
import dns.resolver

from epd.discovery.look_ups import LookUpFailed
from epd.routing.urls import is_address, name_server

TIMEOUT_S = 3.0
"""For an answer, with all that is tried for it."""


class Names:
    """Looks names up, in the domains the machine searches too."""

    def __init__(self, server: str | None = None) -> None:
        """Ask a server, `address` or `address:port`; by default those of the machine."""
        self._server = server
        self._made: dns.asyncresolver.Resolver | None = None

    async def addresses(self, host: str) -> frozenset[str]:
        """All addresses of a name: of version 4, or where it has none of version 6.

        Not both: an instance that has one of each would be two.

        Raises:
            LookUpFailed: the servers do not answer, or with an error.
        """
        if is_address(host):
            return frozenset({host})
        return await self._of(host, "A") or await self._of(host, "AAAA")

    async def _of(self, host: str, kind: str) -> frozenset[str]:
        try:
            answer = await self._resolver().resolve(
                host, kind, search=True, raise_on_no_answer=False
            )
        except dns.resolver.NXDOMAIN:
            return frozenset()
        except dns.exception.DNSException as error:
            raise LookUpFailed(type(error).__name__) from error
        return frozenset(str(record) for record in answer.rrset or ())

    def _resolver(self) -> dns.asyncresolver.Resolver:
        """Made when it is needed: a machine may have no name servers yet.

        Raises:
            NoResolverConfiguration: it has none.
        """
        if self._made is None:
            made = dns.asyncresolver.Resolver(configure=self._server is None)
            made.lifetime = TIMEOUT_S
            if self._server is not None:
                address, made.port = name_server(self._server)
                made.nameservers = [address]
            self._made = made
        return self._made
