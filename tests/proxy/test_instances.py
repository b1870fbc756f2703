"""Registration and removal of instances through `/instances` while requests run."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from epd.routing.instances import Role
from scripts.ports import free_ports
from tests.requests import image, request, text
from tests.support.fake_instance import FakeInstance, after, decodes, refuses
from tests.support.fleet import Fleet, Launch, until
from tests.support.registration import (
    HANDLERS,
    KEY,
    empty,
    listing,
    register,
    taking_part,
    unregister,
)


async def ready(fleet: Fleet) -> tuple[int, str | None]:
    async with fleet.http.get(f"{fleet.url}/ready") as reply:
        return reply.status, reply.headers.get("x-epd-error")


async def test_the_proxy_starts_without_instances_and_logs_it(launch: Launch) -> None:
    async with empty(launch) as fleet:
        assert await ready(fleet) == (503, "no_decode")
        async with fleet.post(request(text())) as reply:
            assert (reply.status, reply.headers["x-epd-error"]) == (503, "no_decode")
            assert int(reply.headers["Retry-After"]) >= 1
        for path, status in {"/health": 200, "/v1/models": 503}.items():
            async with fleet.http.get(fleet.url + path) as reply:
                assert reply.status == status
        assert await listing(fleet, {}) == {role: {"live": [], "evicted": []} for role in Role}


async def test_the_proxy_is_not_ready_before_an_instance_has_answered(launch: Launch) -> None:
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    async with launch(decode=0, decode_servers_urls=(url,)) as fleet:
        assert await ready(fleet) == (503, "no_decode")
        async with FakeInstance(decodes).running(port=port):
            await fleet.ready()


async def test_a_fleet_comes_together_by_registration(launch: Launch) -> None:
    async with empty(launch) as fleet, taking_part(fleet, Role.PREFILL_DECODE) as decode:
        await fleet.ready()
        status, _ = await fleet.chat(request(text()))
        assert status == 200
        async with taking_part(fleet, Role.ENCODE) as encode:
            status, _ = await fleet.chat(request(image(), text()))

            assert status == 200
            assert len(encode.calls) == 1
            assert len(decode.calls) == 2
            page = await listing(fleet)
            assert page["encode"] == {"live": [encode.url], "evicted": []}
            assert page["prefill_decode"]["live"] == [decode.url]
            rows = {row["url"]: row for row in page["instances"]}
            assert (
                rows[encode.url].items()
                >= {
                    "role": "encode",
                    "state": "healthy",
                    "load": 0,
                    "sources": ["api"],
                    "dp_size": 1,
                }.items()
            )
            assert (await listing(fleet, {})).keys() == set(Role)
    said = [(event.state, event.source) for event in fleet.events.changes]
    assert said == [("added", "api"), ("added", "api")]


@pytest.mark.parametrize(
    ("policy", "status", "error"), [("local", 200, None), ("fail", 503, "no_encode")]
)
async def test_on_encode_failure_applies_without_an_encode_instance(
    launch: Launch, policy: str, status: int, error: str | None
) -> None:
    async with (
        empty(launch, on_encode_failure=policy) as fleet,
        taking_part(fleet, Role.PREFILL_DECODE),
        fleet.post(request(image(), text())) as reply,
    ):
        assert (reply.status, reply.headers.get("x-epd-error")) == (status, error)


@pytest.mark.parametrize(
    ("policy", "status", "error"), [("local", 200, None), ("fail", 503, "no_prefill")]
)
async def test_on_prefill_failure_applies_without_a_prefill_instance(
    launch: Launch, policy: str, status: int, error: str | None
) -> None:
    async with (
        empty(launch, on_prefill_failure=policy) as fleet,
        taking_part(fleet, Role.ENCODE),
        taking_part(fleet, Role.DECODE) as decode,
    ):
        async with fleet.post(request(image(), text())) as reply:
            assert (reply.status, reply.headers.get("x-epd-error")) == (status, error)
            degraded = reply.headers.get("x-epd-degraded")
            assert degraded == ("prefill-local" if status == 200 else None)
        async with taking_part(fleet, Role.PREFILL) as prefill:
            async with fleet.post(request(image(), text())) as reply:
                assert reply.status == 200
                assert "x-epd-degraded" not in reply.headers
            assert len(prefill.calls) == 1
            assert "kv_transfer_params" in decode.calls[-1].body


async def test_calls_of_vllms_example_get_its_answers(launch: Launch) -> None:
    """The calls: vLLM 0.33, `tests/v1/ec_connector/unit/test_epd_proxy.py` and its README."""
    url = "http://d0:8000/"
    decode = {"role": "prefill_decode", "url": url, "dp_size": 2}
    async with empty(launch) as fleet:
        assert (await listing(fleet, {}))["encode"]["live"] == []
        assert await register(fleet, decode) == (200, {"registered": True})
        assert await register(fleet, decode) == (200, {"registered": False})
        assert await unregister(fleet, url) == (200, {"removed": True})
        assert await unregister(fleet, url) == (200, {"removed": False})
        cases: list[tuple[dict[str, Any], int]] = [
            ({"dp_size": 0}, 422),
            ({"dp_size": 2, "ec_zmq_addrs": ["tcp://d0:20001"]}, 422),
            ({"role": "decode", "ec_zmq_addrs": ["tcp://d0:20001"]}, 400),
            ({"role": "encode", "ec_zmq_addrs": ["tcp://d0:20001"]}, 400),
            ({"role": "chef"}, 422),
            ({"url": "no url"}, 422),
        ]
        for fields, status in cases:
            body = {"url": "http://d0:8000", "role": "prefill_decode", **fields}
            assert (await register(fleet, body))[0] == status, fields
        refused: list[dict[str, str]] = [{}, {"X-API-Key": "wrong"}]
        for headers in refused:
            assert (await register(fleet, decode, headers))[0] == 403
            assert (await unregister(fleet, "http://e0:8000", headers))[0] == 403


async def test_a_role_is_changed_by_taking_the_registration_back(launch: Launch) -> None:
    async with empty(launch) as fleet:
        assert (await register(fleet, {"role": "encode", "url": "http://x:1"}))[0] == 200
        assert (await register(fleet, {"role": "decode", "url": "http://x:1"}))[0] == 409
        await unregister(fleet, "http://x:1")
        assert (await register(fleet, {"role": "decode", "url": "http://x:1"}))[0] == 200


async def test_registration_needs_the_flag_and_the_list_does_not(launch: Launch) -> None:
    async with launch(admin_api_key=KEY) as fleet:
        assert (await register(fleet, {"role": "encode", "url": "http://x:1"}))[0] == 404
        assert (await unregister(fleet, fleet.e.url))[0] == 404
        page = await listing(fleet)
        assert [row["sources"] for row in page["instances"]] == [["config"]] * 2


@pytest.mark.security("S21")
async def test_registration_needs_an_admin_key_even_from_loopback(launch: Launch) -> None:
    async with launch() as fleet:
        assert (await register(fleet, {"role": "encode", "url": "http://x:1"}, {}))[0] == 403
        assert (await register(fleet, {"role": "encode", "url": "http://x:1"}))[0] == 403


@pytest.mark.security("S21")
async def test_registration_hosts_bound_the_hosts_of_instances(launch: Launch) -> None:
    hosts = "10.0.0.0/8,*.encode.svc"
    async with empty(launch, registration_hosts=hosts) as fleet:
        for url, status in {
            "http://10.9.9.9:8000": 200,
            "http://e1.encode.svc:8000": 200,
            "http://169.254.169.254": 403,
            "http://encode.svc.evil:8000": 403,
        }.items():
            assert (await register(fleet, {"role": "encode", "url": url}))[0] == status, url


@pytest.mark.security("S21")
@pytest.mark.parametrize(
    ("transfer", "role", "address", "status"),
    [
        ({"kv_transfer": "mooncake"}, "prefill", "10.9.9.9:8998", 200),
        ({"kv_transfer": "mooncake"}, "prefill", "http://p.svc:8998", 200),
        ({"kv_transfer": "mooncake"}, "prefill", "169.254.169.254:80", 403),
        ({"kv_transfer": "mooncake"}, "prefill", "http://169.254.169.254", 403),
        ({"kv_transfer": "lmcache"}, "decode", "10.9.9.9:7300+7301:7400+7401", 200),
        ({"kv_transfer": "lmcache"}, "decode", "[::1]:7300:7400", 403),
        ({"ec_transfer": "mooncake"}, "prefill", ["tcp://10.9.9.9:19019"], 200),
        ({"ec_transfer": "mooncake"}, "prefill", ["tcp://169.254.169.254:80"], 403),
    ],
)
async def test_addresses_are_on_hosts_that_are_allowed_too(
    launch: Launch, transfer: dict[str, Any], role: str, address: Any, status: int
) -> None:
    field = "kv_addr" if "kv_transfer" in transfer else "ec_zmq_addrs"
    body = {"role": role, "url": "http://10.9.9.9:8000", field: address}
    async with empty(launch, registration_hosts="10.0.0.0/8,*.svc", **transfer) as fleet:
        assert (await register(fleet, body))[0] == status


async def test_a_configured_instance_stays_when_its_registration_is_removed(
    launch: Launch,
) -> None:
    async with launch(dynamic_registration=True, admin_api_key=KEY) as fleet:
        body = {"role": "encode", "url": fleet.e.url}
        assert await register(fleet, body) == (200, {"registered": True})
        removed = await unregister(fleet, fleet.e.url)

        assert removed == (200, {"removed": True, "still_named_by": ["config"]})
        assert (await listing(fleet))["encode"]["live"] == [fleet.e.url]


async def test_ranks_are_named_only_to_the_consumer(launch: Launch) -> None:
    async with (
        empty(launch) as fleet,
        taking_part(fleet, Role.ENCODE, dp_size=2) as encode,
        taking_part(fleet, Role.PREFILL, dp_size=2) as prefill,
        taking_part(fleet, Role.DECODE, dp_size=2) as decode,
    ):
        for _ in range(3):
            assert (await fleet.chat(request(image(), text())))[0] == 200

    assert ranks(prefill) == ["0", "1", "0"]
    assert set(ranks(encode) + ranks(decode)) == {None}


async def test_ranks_of_configured_consumers(launch: Launch) -> None:
    async with launch(ec_consumer_dp_size=3) as fleet:
        for _ in range(3):
            await fleet.chat(request(text()), {"X-data-parallel-rank": "7"})

        assert sorted(map(str, ranks(fleet.d))) == ["0", "1", "2"]


def ranks(instance: FakeInstance) -> list[str | None]:
    return [call.headers.get("X-data-parallel-rank") for call in instance.calls]


async def test_a_removed_instance_completes_its_requests_and_gets_no_more(
    launch: Launch,
) -> None:
    go = asyncio.Event()

    async with (
        empty(launch) as fleet,
        taking_part(fleet, Role.PREFILL_DECODE) as leaving,
    ):
        leaving.chat = after(go, decodes)
        running = asyncio.create_task(fleet.chat(request(text())))
        await until(lambda: leaving.calls)
        async with taking_part(fleet, Role.PREFILL_DECODE) as staying:
            await unregister(fleet, leaving.url)
            rows = {row["url"]: row for row in (await listing(fleet))["instances"]}
            assert rows[leaving.url].items() >= {"state": "draining", "load": 1}.items()
            for _ in range(3):
                assert (await fleet.chat(request(text())))[0] == 200
            go.set()
            status, _ = await running
            assert status == 200
            assert (len(leaving.calls), len(staying.calls)) == (1, 3)
            urls = [row["url"] for row in (await listing(fleet))["instances"]]
            assert urls == [staying.url]


async def test_an_unhealthy_instance_is_listed_as_evicted_until_it_recovers(launch: Launch) -> None:
    async with (
        empty(launch, probe_interval_s=0.05) as fleet,
        taking_part(fleet, Role.ENCODE) as encode,
    ):
        encode.healthy = False
        await sees(fleet, {"live": [], "evicted": [encode.url]})
        encode.healthy = True
        encode.chat = refuses(500)
        await sees(fleet, {"live": [encode.url], "evicted": []})


async def sees(fleet: Fleet, encode: Mapping[str, list[str]]) -> None:
    async with asyncio.timeout(20):
        while (await listing(fleet))["encode"] != encode:  # noqa: ASYNC110 - the proxy sets no event
            await asyncio.sleep(0.02)


@dataclass
class Load:
    """Clients that send requests, each with a new picture, until they are stopped."""

    fleet: Fleet
    statuses: list[int] = field(default_factory=list)
    over: bool = False

    async def run(self, clients: int) -> None:
        await asyncio.gather(*(self._client(number) for number in range(clients)))

    async def _client(self, number: int) -> None:
        asked = 0
        while not self.over:
            asked += 1
            picture = image(f"{number}-{asked}".encode())
            async with self.fleet.post(request(picture, text(), stream=asked % 2 == 0)) as reply:
                content = await reply.read()
                good = reply.status == 200 and b'"error"' not in content
                self.statuses.append(200 if good else reply.status)

    async def more(self, count: int = 20) -> None:
        """Wait for `count` further answers."""
        enough = len(self.statuses) + count
        await until(lambda: len(self.statuses) >= enough, 30)


@pytest.mark.parametrize("split", [False, True], ids=["1e1pd", "1e1p1d"])
async def test_instances_come_and_go_under_load_and_no_request_fails(
    launch: Launch, split: bool
) -> None:
    roles = [Role.ENCODE, *([Role.PREFILL, Role.DECODE] if split else [Role.PREFILL_DECODE])]
    first, second = ([FakeInstance(HANDLERS[role]) for role in roles] for _ in range(2))
    async with AsyncExitStack() as stack:
        for one in (*first, *second):
            await stack.enter_async_context(one.running())
        fails = {"on_encode_failure": "fail", "on_prefill_failure": "fail"}
        fleet = await stack.enter_async_context(empty(launch, **fails))
        async with asyncio.TaskGroup() as group:
            for role, one in zip(roles, first, strict=True):
                await register(fleet, {"role": role, "url": one.url})
            load = Load(fleet)
            group.create_task(load.run(4))
            await load.more()
            for role, old, new in zip(roles, first, second, strict=True):
                await register(fleet, {"role": role, "url": new.url})
                await load.more()
                assert new.calls
                await unregister(fleet, old.url)
                await load.more()
                asked = len(old.calls)
                await load.more()
                assert len(old.calls) == asked
            load.over = True

    assert set(load.statuses) == {200}
    assert {event.retries for event in fleet.events.requests} == {0}
