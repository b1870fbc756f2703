"""Rows 83 and 84: name servers that fail, are slow, or do not answer."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import dns.asyncresolver
import pytest
from structlog.testing import capture_logs

from epd.http import pool
from epd.http.addresses import Addresses
from epd.media import fetch, names
from tests.discovery.name_server import NameServer
from tests.requests import image, request, text
from tests.support.fake_origin import ALLOWED
from tests.support.fleet import Launch, until
from tests.support.system_names import SystemNames


def renewing() -> Addresses:
    """Return addresses that are looked up again at each use."""
    addresses = Addresses()
    addresses.renewed_s = 0.0
    return addresses


@asynccontextmanager
async def listening() -> AsyncIterator[int]:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


def named(url: str) -> str:
    return url.replace("127.0.0.1", "engine.test")


@pytest.mark.fault(83)
@pytest.mark.parametrize("fault", ["EAI_AGAIN", "EAI_NONAME", "hangs"])
async def test_a_dns_outage_fails_no_request_and_takes_no_instance_down(
    launch: Launch, system: SystemNames, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(pool, "Addresses", renewing)
    async with launch() as up:
        urls = (named(up.d.url),)
        config: dict[str, Any] = {"probe_interval_s": 0.05}
        async with launch(encode=0, decode_servers_urls=urls, **config) as fleet:
            await fleet.ready()
            if fault == "hangs":
                system.hanging = ""
            else:
                system.error = getattr(socket, fault)
            asked, probed = len(system.asked), up.d.probes
            for number in range(10):
                assert (await fleet.chat(request(text(str(number)))))[0] == 200
            await until(lambda: up.d.probes > probed + 5)

            assert len(system.asked) > asked
            async with fleet.http.get(f"{fleet.url}/ready") as reply:
                assert reply.status == 200
            system.go_on()


@pytest.mark.fault(83)
async def test_addresses_follow_a_host_in_the_background(system: SystemNames) -> None:
    addresses = renewing()
    async with listening() as port:
        (await addresses.connect("engine.test", port)).close()
        system.hanging = ""
        for _ in range(3):
            (await addresses.connect("engine.test", port)).close()
        await until(lambda: len(system.asked) == 2)  # one lookup at a time
        system.hanging = None
        system.go_on()
        while len(system.asked) == 2:
            (await addresses.connect("engine.test", port)).close()
    await addresses.close()


@pytest.mark.fault(83)
async def test_a_failing_lookup_is_logged_once_and_its_end_too(system: SystemNames) -> None:
    addresses = renewing()
    async with listening() as port:

        async def lookups(number: int) -> None:
            until_number = len(system.asked) + number
            while len(system.asked) < until_number:
                (await addresses.connect("engine.test", port)).close()

        await lookups(1)
        with capture_logs() as logs:
            system.error = socket.EAI_AGAIN
            await lookups(3)
            system.error = 0
            await lookups(2)
    await addresses.close()

    assert [(log["event"], log["host"]) for log in logs] == [
        ("name lookup failed", "engine.test"),
        ("name lookup works again", "engine.test"),
    ]


@pytest.mark.fault(83)
async def test_addresses_of_a_name_that_stays_missing_are_dropped(
    system: SystemNames,
) -> None:
    addresses = renewing()
    async with listening() as port:
        (await addresses.connect("engine.test", port)).close()
        system.error = socket.EAI_NONAME
        (await addresses.connect("engine.test", port)).close()
        await until(lambda: len(system.asked) == 2)
        addresses.missing_s = 0.0

        with suppress(socket.gaierror):
            while True:
                (await addresses.connect("engine.test", port)).close()
        assert len(addresses) == 0

        system.error = 0
        (await addresses.connect("engine.test", port)).close()
    await addresses.close()


@pytest.mark.fault(84)
async def test_media_on_silent_name_servers_disturb_no_other_request(
    launch: Launch, system: SystemNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their lookups share no threads with those of instances."""
    silent = NameServer(silent=True)
    hosts = [f"m{number}.silent.test" for number in range(16)]
    async with silent.running(), launch() as up:

        def resolver_of(*_: Any) -> dns.asyncresolver.Resolver:
            resolver = dns.asyncresolver.Resolver(configure=False)
            resolver.nameservers, resolver.lifetime = ["127.0.0.1"], names.LOOKUP_S
            resolver.port = int(silent.address.rpartition(":")[2])
            return resolver

        system.hanging = "silent.test"
        monkeypatch.setattr(fetch, "HostNames", partial(names.HostNames, resolver_of=resolver_of))
        monkeypatch.setattr(pool, "Addresses", renewing)
        config: dict[str, Any] = ALLOWED | {
            "allowed_media_domains": ",".join(hosts),
            "decode_servers_urls": (named(up.d.url),),
            "encode_servers_urls": (named(up.e.url),),
            "probe_interval_s": 0.05,
        }
        async with launch(**config) as fleet:
            await fleet.ready()
            slow = asyncio.create_task(
                fleet.chat(request(*[image(f"http://{host}/a.png") for host in hosts]))
            )
            await until(lambda: silent.asked or set(hosts) & set(system.asked))
            probed = up.d.probes
            replies = [await fleet.chat(request(text(str(number)))) for number in range(10)]
            await until(lambda: up.d.probes > probed + 5)
            async with fleet.http.get(f"{fleet.url}/ready") as reply:
                ready = reply.status

            assert [status for status, _ in replies] == [200] * 10
            assert ready == 200
            assert not set(hosts) & set(system.asked)
            status, body = await slow
            assert (status, body["error"]["code"]) == (422, 422)
            assert "name servers" in body["error"]["message"]
