"""Look-ups of the addresses of a name, with a real DNS server."""

from collections.abc import AsyncIterator
from pathlib import Path

import dns.resolver
import pytest

from epd.discovery.dns import DnsNames, LookUpFailed
from tests.discovery.name_server import NameServer


@pytest.fixture
async def server() -> AsyncIterator[NameServer]:
    async with NameServer().running() as server:
        yield server


async def test_all_addresses_of_one_family_are_found(server: NameServer) -> None:
    server.addresses = {
        "both.svc": ["10.0.0.1", "10.0.0.2", "fd00::1"],
        "six.svc": ["fd00::1"],
        "none.svc": [],
    }
    names = DnsNames(server.address)

    assert await names.resolve_addresses("both.svc") == {"10.0.0.1", "10.0.0.2"}
    assert await names.resolve_addresses("six.svc") == {"fd00::1"}
    assert await names.resolve_addresses("none.svc") == set()
    assert await names.resolve_addresses("missing.svc") == set()
    assert await names.resolve_addresses("10.9.9.9") == {"10.9.9.9"}


async def test_a_machine_without_name_servers_gives_no_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = dns.resolver.BaseResolver.read_resolv_conf
    nowhere = str(tmp_path / "resolv.conf")
    monkeypatch.setattr(
        dns.resolver.BaseResolver, "read_resolv_conf", lambda self, _: real(self, nowhere)
    )

    with pytest.raises(LookUpFailed, match="NoResolverConfiguration"):
        await DnsNames().resolve_addresses("a.test")


async def test_a_failing_name_server_differs_from_an_empty_answer(server: NameServer) -> None:
    server.addresses, server.failing = {"e.svc": ["10.0.0.1"]}, True

    with pytest.raises(LookUpFailed):
        await DnsNames(server.address).resolve_addresses("e.svc")
