"""Lookups of media hosts: `/etc/hosts`, `localhost` and the DNS, without threads.

`getaddrinfo` blocks a thread for many seconds if a name server is silent, and clients choose these
names. A lookup here is a task: it ends with its request, and takes at most `LOOKUP_S`.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path

import dns.asyncresolver
import dns.exception
import dns.resolver
from aiohttp.abc import AbstractResolver, ResolveResult

from epd.config.sections import ConfigFields
from epd.media.policy import allows_address

LOOKUP_S = 2.0
"""Time limit of a lookup with all its retries, in seconds."""
TRY_S = 0.7
"""Time after which the next name server is asked, in seconds."""

HOSTS = Path("/etc/hosts")
RESOLV_CONF = Path("/etc/resolv.conf")

LOOPBACK = ("127.0.0.1", "::1")


class NoAllowedAddress(OSError):
    """The policy allows none of the host's addresses."""


@lru_cache(1)
def resolver_of(resolv_conf: Path, _: object) -> dns.asyncresolver.Resolver:
    """Return a resolver with the name servers and search domains of this version of a file.

    Raises:
        dns.resolver.NoResolverConfiguration: the file does not exist, or names no server.
    """
    resolver = dns.asyncresolver.Resolver(configure=False)
    resolver.read_resolv_conf(resolv_conf)
    resolver.lifetime, resolver.timeout = LOOKUP_S, TRY_S
    return resolver


class HostNames(AbstractResolver):
    """Resolves host names as the machine's files say. Other sources of `nsswitch.conf` are unused.

    `localhost` and names below it are loopback addresses, and are never asked for (RFC 6761).
    """

    def __init__(
        self,
        hosts: Path = HOSTS,
        resolv_conf: Path = RESOLV_CONF,
        resolver_of: Callable[[Path, object], dns.asyncresolver.Resolver] = resolver_of,
    ) -> None:
        self._hosts = hosts
        self._resolv_conf = resolv_conf
        self._resolver_of = resolver_of

    async def resolve(
        self,
        host: str,
        port: int = 0,
        family: socket.AddressFamily = socket.AF_UNSPEC,  # noqa: ARG002 - of the interface
    ) -> list[ResolveResult]:
        """Return all addresses of a name, IPv4 first.

        Raises:
            socket.gaierror: the name has no address (`EAI_NONAME`), or the name servers did not
                answer (`EAI_AGAIN`).
        """
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if _is_ipv6(address) else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in await self._addresses(host)
        ]

    async def _addresses(self, host: str) -> tuple[str, ...]:
        name = host.rstrip(".").lower()
        if known := _hosts_of(self._hosts, _version(self._hosts)).get(name):
            return known
        if name == "localhost" or name.endswith(".localhost"):
            return LOOPBACK
        answers = await asyncio.gather(self._records(host, "A"), self._records(host, "AAAA"))
        if found := [address for answer in answers for address in answer or ()]:
            return tuple(found)
        if None in answers:
            raise socket.gaierror(socket.EAI_AGAIN, "the name servers did not answer")
        raise socket.gaierror(socket.EAI_NONAME, "the name has no address")

    async def _records(self, host: str, kind: str) -> list[str] | None:
        """Return the addresses of one family; None if no name server answered."""
        try:
            resolver = self._resolver_of(self._resolv_conf, _version(self._resolv_conf))
            answer = await resolver.resolve(host, kind, search=True, raise_on_no_answer=False)
        except (dns.resolver.NXDOMAIN, dns.exception.SyntaxError, dns.exception.FormError):
            return []
        except (dns.exception.DNSException, OSError, ValueError):  # also an invalid resolv.conf
            return None
        return [str(record) for record in answer.rrset or ()]

    async def close(self) -> None:
        """Do nothing: a lookup ends with the task that waits for it."""


class CheckedResolver(AbstractResolver):
    """Resolves names to the addresses that the policy allows.

    aiohttp connects to these addresses without a second lookup, so a second answer of the name
    server cannot bypass the check.
    """

    def __init__(self, config: ConfigFields, resolver: AbstractResolver) -> None:
        self._config = config
        self._resolver = resolver

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the allowed addresses of the name.

        Raises:
            NoAllowedAddress: it has other addresses only.
            socket.gaierror: the lookup failed.
        """
        found = await self._resolver.resolve(host, port, family)
        config = self._config
        allowed = [address for address in found if allows_address(config, address["host"])]
        if not allowed:
            raise NoAllowedAddress("no allowed address")
        return allowed

    async def close(self) -> None:
        await self._resolver.close()


def _version(path: Path) -> object:
    """Return a value that differs after a change of the file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


@lru_cache(1)
def _hosts_of(path: Path, _: object) -> Mapping[str, tuple[str, ...]]:
    """Return the addresses of each name in lower case, IPv4 first. Invalid lines are ignored."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for line in text.splitlines():
        address, *names = line.partition("#")[0].split() or [""]
        try:
            ip_address(address)
        except ValueError:
            continue
        for name in map(str.lower, names):
            found[name] = (*found.get(name, ()), address)
    return {name: tuple(sorted(known, key=_is_ipv6)) for name, known in found.items()}


def _is_ipv6(address: str) -> bool:
    return ":" in address
