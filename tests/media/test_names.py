"""Lookups of media hosts by a real name server over UDP."""
# ruff: noqa: ASYNC240 - small files

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import dns.asyncresolver
import pytest

from epd.media.names import HostNames, resolver_of
from tests.discovery.name_server import NameServer


@pytest.fixture
async def server() -> AsyncIterator[NameServer]:
    async with NameServer().running() as server:
        yield server


@pytest.fixture
def resolv_conf(server: NameServer, tmp_path: Path) -> Path:
    """Return a file that names the server."""
    address = server.address.partition(":")[0]
    path = tmp_path / "resolv.conf"
    path.write_text(f"nameserver {address}\nsearch corp.test\n")

    return path


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text("127.0.0.1 localhost\n")
    return path


@pytest.fixture
def known(server: NameServer, resolv_conf: Path, hosts: Path) -> HostNames:
    def resolver_with_port(path: Path, version: object) -> dns.asyncresolver.Resolver:
        resolver = resolver_of(path, version)
        resolver.port = int(server.address.partition(":")[2])
        resolver.lifetime, resolver.timeout = 1.0, 0.3
        return resolver

    return HostNames(hosts, resolv_conf, resolver_with_port)


async def addresses(resolver: HostNames, name: str) -> list[str]:
    return [found["host"] for found in await resolver.resolve(name, 443)]


async def failure(resolver: HostNames, name: str) -> int | None:
    with pytest.raises(socket.gaierror) as raised:
        await resolver.resolve(name)
    return raised.value.errno


async def test_host_names_returns_addresses_of_both_families(
    server: NameServer, known: HostNames
) -> None:
    server.addresses = {"cdn.test": ["2001:db8::1", "192.0.2.1", "192.0.2.2"]}

    *first, last = await addresses(known, "cdn.test")
    assert sorted(first) == ["192.0.2.1", "192.0.2.2"]
    assert last == "2001:db8::1"


async def test_host_names_uses_the_search_domains(server: NameServer, known: HostNames) -> None:
    server.addresses = {"media.corp.test": ["192.0.2.1"]}

    assert await addresses(known, "media") == ["192.0.2.1"]
    assert await failure(known, "media.") == socket.EAI_NONAME


async def test_host_names_reads_changed_files(
    server: NameServer, known: HostNames, hosts: Path, resolv_conf: Path
) -> None:
    server.addresses = {"media.other.test": ["192.0.2.9"]}
    assert await failure(known, "media") == socket.EAI_NONAME

    resolv_conf.write_text(resolv_conf.read_text().replace("corp.test", "other.test"))
    assert await addresses(known, "media") == ["192.0.2.9"]

    hosts.write_text("::2 a media # comment\nnot-an-address media\n192.0.2.5 Media\n")
    asked = server.asked
    assert await addresses(known, "MEDIA.") == ["192.0.2.5", "::2"]
    assert server.asked == asked


@pytest.mark.parametrize("name", ["localhost", "LocalHost.", "a.localhost"])
async def test_host_names_never_asks_for_localhost(
    server: NameServer, known: HostNames, hosts: Path, name: str
) -> None:
    hosts.unlink()

    assert await addresses(known, name) == ["127.0.0.1", "::1"]
    assert server.asked == 0


@pytest.mark.parametrize("name", ["none.test", "a..b", f"{'a' * 64}.test", "a." * 128])
async def test_host_names_tells_a_missing_name(known: HostNames, name: str) -> None:
    assert await failure(known, name) == socket.EAI_NONAME


@pytest.mark.parametrize("fault", ["failing", "silent"])
async def test_host_names_tells_a_failure_of_the_name_servers(
    server: NameServer, known: HostNames, fault: str
) -> None:
    setattr(server, fault, True)
    assert await failure(known, "cdn.test") == socket.EAI_AGAIN

    setattr(server, fault, False)
    server.addresses = {"cdn.test": ["192.0.2.1"]}
    assert await addresses(known, "cdn.test") == ["192.0.2.1"]


@pytest.mark.parametrize("text", [None, "", "nameserver none\n"])
async def test_host_names_without_name_servers_fails_until_there_is_one(
    server: NameServer, known: HostNames, resolv_conf: Path, text: str | None
) -> None:
    written = resolv_conf.read_text()
    resolv_conf.unlink() if text is None else resolv_conf.write_text(text)
    assert await failure(known, "cdn.test") == socket.EAI_AGAIN

    resolv_conf.write_text(written)
    server.addresses = {"cdn.test": ["192.0.2.1"]}
    assert await addresses(known, "cdn.test") == ["192.0.2.1"]


async def test_an_abandoned_lookup_ends_at_once(server: NameServer, known: HostNames) -> None:
    server.silent = True
    lookup = asyncio.create_task(known.resolve("cdn.test"))
    while not server.asked:  # noqa: ASYNC110 - the server sets no event
        await asyncio.sleep(0.01)
    lookup.cancel()

    await asyncio.wait([lookup])
    assert lookup.cancelled()
    assert asyncio.all_tasks() == {asyncio.current_task()}
