"""Instances by DNS name, with a real DNS server: how its answers change the membership."""

import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from epd.discovery.dns import DnsNames
from epd.discovery.watched_names import DnsState, WatchedNames
from epd.routing.instances import Instance, Role
from epd.routing.registry import Registry
from epd.routing.table import InstanceTable
from epd.upstream import Upstream
from tests.certificates import Authority
from tests.discovery.name_server import NameServer
from tests.requests import image, request, text
from tests.support.fake_instance import FakeInstance, encodes
from tests.support.fleet import Fleet, Launch


def test_addresses_are_kept_while_lookups_fail_and_for_a_while_when_empty() -> None:
    sightings = DnsState()
    sightings.record_addresses({"a", "b"}, 0)
    sightings.record_failure()
    sightings.record_addresses((), 10)
    sightings.record_addresses((), 69)
    assert sightings.current == {"a", "b"}
    sightings.record_addresses((), 70)
    assert sightings.current == set()


def test_a_failure_or_an_answer_restarts_that_time() -> None:
    sightings = DnsState()
    sightings.record_addresses({"a"}, 0)
    sightings.record_addresses((), 10)
    sightings.record_failure()
    sightings.record_addresses((), 80)
    assert sightings.current == {"a"}
    sightings.record_addresses({"b"}, 90)
    sightings.record_addresses((), 141)

    assert sightings.current == {"b"}


@pytest.fixture
async def server() -> AsyncIterator[NameServer]:
    async with NameServer().running() as server:
        yield server


@asynccontextmanager
async def discovering(
    launch: Launch, server: NameServer, port: int, **config: Any
) -> AsyncIterator[Fleet]:
    settings: dict[str, Any] = {
        "discover_encode": f"e.svc:{port}",
        "discovery_dns_server": server.address,
    } | config
    async with launch(encode=0, **settings) as fleet:
        yield fleet


async def test_membership_follows_the_name_and_survives_its_failures(server: NameServer) -> None:
    table, look_up = InstanceTable(), DnsNames(server.address).resolve_addresses
    async with Upstream.connect() as upstream:
        service = Instance(Role.ENCODE, "http://e.svc:8000")
        names = WatchedNames([service], look_up, Registry(table), upstream)

        async def urls() -> set[str]:
            await names.look()
            return {instance.url for instance in table.of_roles(Role.ENCODE)}

        both = {"http://127.0.0.1:8000", "http://127.0.0.2:8000"}
        server.addresses = {"e.svc": ["127.0.0.1"]}
        assert await urls() == {"http://127.0.0.1:8000"}
        server.addresses = {"e.svc": ["127.0.0.1", "127.0.0.2"]}
        assert await urls() == both
        server.failing = True
        assert await urls() == both
        server.failing, server.addresses = False, {}
        assert await urls() == both
        server.addresses = {"e.svc": ["127.0.0.2"]}
        assert await urls() == {"http://127.0.0.2:8000"}


async def test_a_name_is_looked_up_before_the_first_request(
    launch: Launch, server: NameServer
) -> None:
    async with FakeInstance(encodes).running() as encode:
        server.addresses = {"e.svc": ["127.0.0.1"]}
        async with discovering(launch, server, int(encode.url.rpartition(":")[2])) as fleet:
            assert (await fleet.chat(request(image(), text())))[0] == 200
            assert len(encode.calls) == 1


async def test_the_certificate_of_an_address_is_its_names(
    launch: Launch, server: NameServer, tmp_path: Path
) -> None:
    authority = Authority.made(tmp_path)
    async with AsyncExitStack() as stack:
        instances = []
        for host in ("e.svc", "other.svc"):
            issued = authority.issue(host)
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(issued.chain, issued.key)
            instance = FakeInstance(encodes)
            await stack.enter_async_context(instance.running(context))
            instances.append(instance)
        right, wrong = instances
        server.addresses = {"e.svc": ["127.0.0.1"]}
        ports = [one.url.rpartition(":")[2] for one in instances]
        fleet = await stack.enter_async_context(
            discovering(
                launch,
                server,
                0,
                discover_encode=",".join(f"https://e.svc:{port}" for port in ports),
                upstream_ca_file=authority.ca,
                encode_balance="round_robin",
            )
        )
        for number in range(4):
            status, _ = await fleet.chat(request(image(str(number).encode()), text()))
            assert status == 200

        assert len(right.calls) == 4
        assert wrong.calls == []
