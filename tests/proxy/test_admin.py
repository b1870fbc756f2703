"""Health, models and profiling, which the proxy asks of every instance."""

import asyncio
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

import epd
from epd.routing.instances import Instance, Role
from epd.server.app_keys import TABLE
from epd.server.health import FRESH_S
from tests.requests import image, request, text
from tests.support.fake_instance import refuses
from tests.support.fleet import Fleet, Launch, until


async def test_health_of_a_healthy_fleet(launch: Launch) -> None:
    async with launch(encode=2, prefill=1) as fleet, fleet.http.get(fleet.url + "/health") as reply:
        body = await reply.json()

        assert reply.status == 200
        assert body["proxy"] == "healthy"
        clusters = [body[f"{stage}_cluster"] for stage in ("encode", "prefill", "decode")]
        assert clusters == ["healthy"] * 3
        assert set(body["instances"]) == {
            instance.url for instance in fleet.encode + fleet.prefill + fleet.decode
        }


async def test_health_without_prefill_instances(launch: Launch) -> None:
    async with launch() as fleet, fleet.http.get(fleet.url + "/health") as reply:
        body = await reply.json()

        assert (reply.status, body["prefill_cluster"]) == (200, "empty")
        assert body["instances"][fleet.d.url]["roles"] == ["prefill_decode"]


async def test_health_is_degraded_and_200_if_one_of_two_instances_fails(launch: Launch) -> None:
    async with launch(encode=2) as fleet:
        fleet.encode[1].healthy = False
        async with fleet.http.get(fleet.url + "/health") as reply:
            body = await reply.json()

        assert (reply.status, body["encode_cluster"]) == (200, "degraded")
        assert body["instances"][fleet.encode[0].url]["state"] == "healthy"
        assert body["instances"][fleet.encode[1].url] == {
            "roles": ["encode"],
            "routing": {"encode": "failing"},
            "status": 503,
            "state": "failing",
        }


@pytest.mark.parametrize(("instances", "state"), [(1, "suspect"), (3, "ejected")])
async def test_health_of_an_ejected_instance_does_not_contradict_itself(
    launch: Launch, instances: int, state: str
) -> None:
    """The instance passes its health check, but gets requests only if too few others are left."""
    async with launch(encode=instances, eject_after=1, encode_balance="round_robin") as fleet:
        fleet.e.chat = refuses(500)
        for number in range(instances):
            await fleet.chat(request(image(b"%d" % number)))
        async with fleet.http.get(fleet.url + "/health") as reply:
            body = await reply.json()

    shown = body["instances"][fleet.e.url]
    assert (shown["state"], shown["routing"]) == (state, {"encode": state})
    assert (reply.status, body["encode_cluster"]) == (200, "degraded")


@pytest.mark.parametrize("stage", ["encode", "prefill"])
@pytest.mark.parametrize(("failure", "status"), [("local", 200), ("fail", 503)])
async def test_a_missing_stage_is_a_503_only_if_no_other_does_its_work(
    launch: Launch, stage: str, failure: str, status: int
) -> None:
    config: Any = {f"on_{stage}_failure": failure}
    async with launch(prefill=1, **config) as fleet:
        for instance in getattr(fleet, stage):
            instance.healthy = False
        async with fleet.http.get(fleet.url + "/health") as reply:
            body = await reply.json()

        assert reply.status == status
        assert body["proxy"] == ("degraded" if status == 200 else "healthy")
        assert body[f"{stage}_cluster"] == "unhealthy"


async def test_outputs_that_are_pushed_need_an_encode_instance(launch: Launch) -> None:
    config: Any = {"ec_transfer": "mooncake", "ec_consumer_zmq_addrs": ("tcp://127.0.0.1:1",)}
    async with launch(**config) as fleet:
        fleet.e.healthy = False
        async with fleet.http.get(fleet.url + "/health") as reply:
            assert reply.status == 503


async def test_a_stage_without_a_healthy_instance_is_a_503(launch: Launch) -> None:
    async with launch(decode_servers_urls=("http://127.0.0.1:9",)) as fleet:
        async with fleet.http.get(fleet.url + "/health") as reply:
            body = await reply.json()

        assert (reply.status, body["decode_cluster"]) == (503, "unhealthy")
        assert body["encode_cluster"] == "healthy"
        assert body["instances"]["http://127.0.0.1:9"]["error"]


async def test_an_instance_that_does_not_answer_is_unhealthy_by_the_deadline(
    launch: Launch,
) -> None:
    accepted = []

    async def accepts(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(accepts, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    config: Any = {"encode_servers_urls": (url,), "on_encode_failure": "fail"}
    async with silent, launch(**config, health_timeout_s=0.2) as fleet:
        async with fleet.http.get(fleet.url + "/health") as reply:
            body = await asyncio.wait_for(reply.json(), 20)

        assert accepted
        assert (reply.status, body["encode_cluster"]) == (503, "unhealthy")
        assert body["decode_cluster"] == "healthy"


@pytest.mark.fault(58)
async def test_concurrent_health_requests_query_each_instance_once(launch: Launch) -> None:
    asked: list[str] = []
    answer = asyncio.Event()

    async def health(_: web.Request) -> web.Response:
        asked.append("health")
        await answer.wait()
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", health)

    async def status(fleet: Fleet) -> int:
        async with fleet.http.get(fleet.url + "/health") as reply:
            return reply.status

    async with TestServer(app) as instance:
        url = str(instance.make_url("")).rstrip("/")
        async with launch(encode_servers_urls=(url,), probe_interval_s=60) as fleet:
            await until(lambda: asked)  # the proxy's own probe
            asking = [asyncio.create_task(status(fleet)) for _ in range(30)]
            await until(lambda: len(asked) == 2)
            gone = asking.pop()
            gone.cancel()
            await asyncio.sleep(0.1)
            answer.set()
            assert await asyncio.gather(*asking) == [200] * 29
            assert [await status(fleet) for _ in range(5)] == [200] * 5
            assert len(asked) == 2

            await asyncio.sleep(FRESH_S)
            assert await status(fleet) == 200
            assert len(asked) == 3


async def test_models_are_the_decode_sides(launch: Launch) -> None:
    async with launch(prefill=1) as fleet, fleet.http.get(fleet.url + "/v1/models") as reply:
        assert await reply.json() == {"object": "list", "data": [{"id": "m"}]}
        assert fleet.d.other_calls == ["GET /v1/models"]
        assert fleet.e.other_calls == fleet.p.other_calls == []


async def test_profiling_reaches_every_instance_of_every_stage(launch: Launch) -> None:
    async with launch(encode=2, prefill=2, decode=2) as fleet:
        fleet.encode[0].profiler = False
        fleet.prefill[0].profiled = b'{"traces": 3}'
        for command in ("start", "stop"):
            async with fleet.http.post(f"{fleet.url}/{command}_profile") as reply:
                body = await reply.json()

            assert reply.status == 200
            assert body == {
                "encode": {
                    fleet.encode[0].url: {"status": 404},
                    fleet.encode[1].url: {"status": 200},
                },
                "prefill": {
                    fleet.prefill[0].url: {"status": 200, "body": {"traces": 3}},
                    fleet.prefill[1].url: {"status": 200},
                },
                "decode": {instance.url: {"status": 200} for instance in fleet.decode},
            }
        for instance in fleet.encode + fleet.prefill + fleet.decode:
            assert instance.other_calls == ["POST /start_profile", "POST /stop_profile"]


async def test_asking_for_models_moves_no_turn(launch: Launch) -> None:
    async with launch(decode=2) as fleet:
        for _ in range(4):
            async with fleet.http.get(fleet.url + "/v1/models") as reply:
                assert reply.status == 200
            await fleet.chat(request(text()))

        assert [len(instance.calls) for instance in fleet.decode] == [2, 2]


async def test_a_failed_profiling_names_the_instance(launch: Launch) -> None:
    async with launch(decode_servers_urls=("http://127.0.0.1:9",)) as fleet:
        fleet.e.profiler = False
        async with fleet.http.post(f"{fleet.url}/start_profile", json={}) as reply:
            body = await reply.json()

        assert reply.status == 200
        assert body["encode"][fleet.e.url] == {"status": 404}
        assert body["decode"]["http://127.0.0.1:9"]["error"]


async def test_profiling_in_an_application_that_mounts_the_proxy(launch: Launch) -> None:
    async with launch() as fleet:
        urls = {"encode_servers_urls": (fleet.e.url,), "decode_servers_urls": (fleet.d.url,)}
        outer = web.Application()
        config = epd.ProxyConfig(**urls, host="127.0.0.1")
        outer.add_subapp("/epd", epd.create_app(config, observers=[]))
        async with (
            TestClient(TestServer(outer)) as client,
            client.post("/epd/start_profile") as reply,
        ):
            assert reply.status == 200
        assert fleet.e.other_calls == ["POST /start_profile"]


async def test_profiling_that_no_instance_has_is_a_503(launch: Launch) -> None:
    async with launch() as fleet:
        fleet.e.profiler = fleet.d.profiler = False
        async with fleet.http.post(f"{fleet.url}/start_profile", json={}) as reply:
            assert reply.status == 503
            assert (await reply.json())["error"]["code"] == 503


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("POST", "/start_profile")])
async def test_instances_may_come_and_go_while_all_are_asked(
    launch: Launch, method: str, path: str
) -> None:
    asked = list[str]()
    answer = asyncio.Event()

    async def waits(asking: web.Request) -> web.Response:
        asked.append(asking.path)
        await answer.wait()
        return web.Response()

    app = web.Application()
    app.router.add_route("*", "/{anything}", waits)
    async with TestServer(app) as instance:
        url = str(instance.make_url("")).rstrip("/")
        async with launch(decode_servers_urls=(url,), probe_interval_s=60) as fleet:
            table = fleet.runner.app[TABLE]
            [gone] = table.of_roles(Role.PREFILL_DECODE)
            await until(lambda: asked)  # the proxy's own probe

            async def status() -> int:
                async with fleet.http.request(method, fleet.url + path) as reply:
                    return reply.status

            asking = asyncio.create_task(status())
            await until(lambda: len(asked) == 2)
            table.remove(gone)
            table.add(Instance(Role.PREFILL_DECODE, "http://new:1"))
            answer.set()

            assert await asking == 200
