"""Access control: the admin key, and no routes except the documented ones."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import epd
from tests.security.wire import ask, silent
from tests.support.clients import ALICE, bearer
from tests.support.fleet import Fleet, Launch
from tests.support.programs import INSTANCES, called, serving

ADMIN = "admin-key-0123456789"

ON_BEHALF = (
    *("Forwarded", "Via", "Origin", "X-Real-IP", "X-Forwarded-For", "X-Forwarded-Proto"),
    *("X-Envoy-External-Address", "CF-Connecting-IP", "True-Client-IP", "X-Client-IP"),
)

ADMIN_ROUTES = [
    *(("GET", path) for path in ("/metrics", "/settings", "/ui/state")),
    *(("POST", path) for path in ("/start_profile", "/stop_profile")),
]

ENGINE_ROUTES = [
    *("/invocations", "/collective_rpc", "/update_weights", "/sleep", "/wake_up", "/is_sleeping"),
    *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/pause", "/resume"),
    *("/abort_requests", "/server_info", "/load", "/generative_scoring"),
    *("/init_weight_transfer_engine", "/release_kv_cache_memory", "/scale_elastic_ep"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/kv_event_sources"),
    *("/v1/realtime", "/v1/chat/completions/render", "/v1/completions/render", "/docs"),
    *("/cohere/v2/chat", "/v1/systemone", "/inference/v1/generate", "/v1/chat/completions/batch"),
    "/v1/responses/a/input_items",
]
"""Routes that vLLM has and the proxy must not have."""

SPELLINGS = [
    "{path}",
    "/{path}",
    "{path}/",
    "{path}?x=/v1/models",
    "/v1/..{path}",
    "/v1/models/..{path}",
    "/v1/models/%2e%2e{path}",
    "/v1/models%2f..{path}",
    "/health/..;{path}",
    "/.{path}",
    "{path}%00",
    "{path}#/health",
    "/health%3f{path}",
    "http://instance:8001{path}",
]


async def status_of(
    fleet: Fleet, method: str, path: str, headers: dict[str, str] | None = None
) -> int:
    async with fleet.http.request(method, fleet.url + path, headers=headers) as reply:
        if reply.status in {401, 403}:
            error = (await reply.json())["error"]
            assert (error["code"], set(error)) == (
                reply.status,
                {"message", "type", "param", "code"},
            )
            assert (
                reply.headers["x-epd-error"]
                == {401: "invalid_api_key", 403: "admin_only"}[reply.status]
            )
        return reply.status


def asked_of_instances(fleet: Fleet) -> list[str]:
    return [call for one in (*fleet.encode, *fleet.decode) for call in one.other_calls]


@pytest.mark.security("S3")
@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
@pytest.mark.parametrize("headers", [{"X-API-Key": ADMIN}, bearer(ADMIN)])
async def test_the_admin_key_opens_the_operator_routes(
    launch: Launch, keys: Path, method: str, path: str, headers: dict[str, str]
) -> None:
    async with launch(admin_api_key=ADMIN, api_keys_file=keys) as fleet:
        assert await status_of(fleet, method, path, headers) == 200


WRONG: list[dict[str, str]] = [
    {},
    {"X-API-Key": ""},
    {"X-API-Key": ADMIN[:-1]},
    {"X-API-Key": ADMIN + "x"},
    {"X-API-Key": ALICE},
    {"X-API-Key": "wrong", **bearer(ADMIN)},
    bearer(ALICE),
    {"Authorization": ADMIN},
    {"Authorization": f"Basic {ADMIN}"},
    {"Cookie": f"X-API-Key={ADMIN}"},
]


@pytest.mark.security("S3")
@pytest.mark.parametrize("headers", WRONG)
async def test_admin_routes_accept_only_the_admin_key(
    launch: Launch, keys: Path, headers: dict[str, str]
) -> None:
    """Clients on loopback need the admin key too."""
    async with launch(admin_api_key=ADMIN, api_keys_file=keys) as fleet:
        for method, path in ADMIN_ROUTES:
            assert await status_of(fleet, method, path, headers) == 401
        assert asked_of_instances(fleet) == []


async def test_two_admin_keys_are_none(launch: Launch) -> None:
    async with launch(admin_api_key=ADMIN) as fleet:
        two = [("X-API-Key", "wrong-key-0123456789"), ("X-API-Key", ADMIN)]
        async with fleet.http.get(f"{fleet.url}/metrics", headers=two) as reply:
            assert reply.status == 401


@pytest.mark.security("S3")
async def test_the_admin_key_belongs_to_no_tenant(launch: Launch, keys: Path) -> None:
    async with launch(admin_api_key=ADMIN, api_keys_file=keys) as fleet:
        assert await status_of(fleet, "GET", "/v1/models", bearer(ADMIN)) == 401
        assert await status_of(fleet, "GET", "/v1/models", {"X-API-Key": ADMIN}) == 401


@pytest.mark.security("S3", "S2")
@pytest.mark.parametrize("headers", [{"X-API-Key": ADMIN}, bearer(ADMIN)])
async def test_the_admin_key_reaches_no_instance(launch: Launch, headers: dict[str, str]) -> None:
    seen: list[str] = []

    async def profiles(request: web.Request) -> web.Response:
        seen.append(str(request.headers))
        return web.Response()

    engine = web.Application()
    engine.router.add_post("/start_profile", profiles)
    async with TestServer(engine) as server:
        url = f"http://127.0.0.1:{server.port}"
        async with launch(decode_servers_urls=(url,), admin_api_key=ADMIN) as fleet:
            assert await status_of(fleet, "POST", "/start_profile", headers) == 200

    assert len(seen) == 1
    assert ADMIN not in seen[0]


@pytest.mark.security("S3")
async def test_admin_routes_without_an_admin_key_are_open_to_this_machine(
    launch: Launch, keys: Path
) -> None:
    async with launch(api_keys_file=keys) as fleet:
        for method, path in ADMIN_ROUTES:
            assert await status_of(fleet, method, path) == 200


@pytest.mark.security("S3")
@pytest.mark.parametrize(
    "headers",
    [
        *({name: "127.0.0.1"} for name in ON_BEHALF),
        {"Host": "epd.example.com"},
        {"Host": "127.0.0.1.example.com:8000"},
        {"Host": "["},
        {"X-Forwarded-For": "127.0.0.1", **bearer(ALICE)},
    ],
)
async def test_local_requests_on_behalf_of_another_client_are_refused(
    launch: Launch, keys: Path, headers: dict[str, str]
) -> None:
    """The proxy rejects requests through a reverse proxy or a web page on this machine."""
    async with launch(api_keys_file=keys) as fleet:
        for method, path in ADMIN_ROUTES:
            answer = await ask(fleet.url, f"{method} {path} HTTP/1.1", headers.items())
            assert answer.status == 403
            assert answer.error["type"] == "PermissionDeniedError"
            assert answer.headers["x-epd-error"] == "admin_only"
        assert asked_of_instances(fleet) == []


def own_address() -> str:
    """Return the address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends no packet
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


@pytest.fixture(scope="module")
def open_port() -> Iterator[str]:
    """Run a proxy that listens on all addresses; yield its port."""
    with serving(*INSTANCES, "--host", "0.0.0.0") as (url, _):  # noqa: S104
        yield url.rpartition(":")[2]


@pytest.mark.security("S3")
@pytest.mark.parametrize("headers", [{}, {"X-Forwarded-For": "127.0.0.1"}, {"Host": "localhost"}])
async def test_admin_routes_without_an_admin_key_are_closed_on_an_address_for_other_machines(
    open_port: str, headers: dict[str, str]
) -> None:
    """They are closed to clients of this machine too: one may be a proxy that adds no header."""
    for host in (own_address(), "127.0.0.1"):
        answer = await ask(f"http://{host}:{open_port}", "GET /metrics HTTP/1.1", headers.items())

        assert answer.status == 403
        assert answer.headers["x-epd-error"] == "admin_only"
        assert "EPD_ADMIN_API_KEY" in answer.error["message"]


@pytest.mark.security("S3")
async def test_a_peer_without_an_address_is_no_client_of_this_machine(tmp_path: Path) -> None:
    """An application that embeds the proxy may listen on sockets without addresses."""
    config = epd.ProxyConfig(
        encode_servers_urls=("http://e:1",), decode_servers_urls=("http://d:1",), host="127.0.0.1"
    )
    runner = web.AppRunner(epd.create_app(config, observers=[]))
    await runner.setup()
    path = str(tmp_path / "socket")
    await web.UnixSite(runner, path).start()
    try:
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as http,
            http.get("http://localhost/metrics") as reply,
        ):
            assert reply.status == 403
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("variable", ["EPD_ADMIN_API_KEY", "ADMIN_API_KEY"])
@pytest.mark.security("S3")
async def test_the_admin_key_comes_by_environment(variable: str) -> None:
    with serving(*INSTANCES, env={variable: ADMIN}) as (url, _):
        line = "GET /metrics HTTP/1.1"
        assert (await ask(url, line)).status == 401
        assert (await ask(url, line, [("X-API-Key", ADMIN)])).status == 200


@pytest.mark.parametrize(
    ("variable", "size"),
    [
        ("EPD_ADMIN_API_KEY", "16 to 512"),
        ("ADMIN_API_KEY", "16 to 512"),
        ("EPD_KEY_SECRET", "at least 16"),
    ],
)
def test_a_short_secret_ends_the_start_in_one_line(variable: str, size: str) -> None:
    ended = called("serve", *INSTANCES, env={variable: "sh0rt"})

    assert ended.returncode == 2
    assert f"{variable} must have {size}" in ended.stderr
    assert "sh0rt" not in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.security("S4")
@pytest.mark.parametrize("path", ENGINE_ROUTES)
async def test_clients_reach_no_other_route_of_an_engine(launch: Launch, path: str) -> None:
    async with (
        silent() as instance,
        launch(
            encode_servers_urls=(instance.url,), decode_servers_urls=(f"{instance.url}/base",)
        ) as fleet,
    ):
        for spelling in SPELLINGS:
            target = spelling.format(path=path)
            for method in ("GET", "POST"):
                answer = await ask(fleet.url, f"{method} {target} HTTP/1.1", body=b"{}")
                assert answer.status in {400, 404, 405}, target
                if answer.status != 400:  # aiohttp's parser answers 400 itself
                    assert answer.error["message"]
                    assert answer.headers["x-epd-error"] == "unknown_route"
                assert instance.lines == [], target


@pytest.mark.security("S4")
@pytest.mark.parametrize(
    "line",
    [
        "CONNECT instance:8001 HTTP/1.1",
        "OPTIONS * HTTP/1.1",
        "GET * HTTP/1.1",
        *(
            f"{method} {path} HTTP/1.1"
            for method in ("TRACE", "OPTIONS", "PUT", "PATCH", "DELETE", "PROPFIND", "ODD")
            for path in ("/v1/chat/completions", "/v1/models", "/start_profile", "/nothing")
        ),
        "HEAD /v1/chat/completions HTTP/1.1",
        "HEAD /nothing HTTP/1.1",
        "GET /v1/chat/completions HTTP/1.1",
        "POST /v1/models HTTP/1.1",
        "GET /v1/media/cat HTTP/1.1",
        "DELETE /v1/media/ HTTP/1.1",
        "DELETE /v1/media/a/b HTTP/1.1",
        "GET /v1 HTTP/1.1",
        "POST / HTTP/1.1",
        "PUT / HTTP/1.1",
    ],
)
async def test_proxy_rejects_other_methods_and_request_targets(launch: Launch, line: str) -> None:
    async with (
        silent() as instance,
        launch(encode_servers_urls=(instance.url,), decode_servers_urls=(instance.url,)) as fleet,
    ):
        answer = await ask(fleet.url, line)

        assert answer.status in {400, 404, 405}
        assert instance.lines == []
        if answer.status == 405:
            assert answer.headers["Allow"]


@pytest.mark.security("S4")
async def test_an_absolute_target_is_this_proxys_own(launch: Launch) -> None:
    """RFC 9112, 3.2.2: the server must accept an absolute target. It does not select a host."""
    async with silent() as other, launch() as fleet:
        there = await ask(fleet.url, f"GET {other.url}/v1/models HTTP/1.1")
        here = await ask(fleet.url, f"GET {fleet.url}/v1/models HTTP/1.1")

        assert (there.status, here.status) == (400, 200)  # Host names this proxy in both requests
        assert fleet.d.other_calls == ["GET /v1/models"]
        assert other.lines == []


@pytest.mark.security("S3")
async def test_a_target_on_this_machine_does_not_hide_a_host_elsewhere(launch: Launch) -> None:
    """The reverse holds too: a web page's requests have the page's own host."""
    async with launch() as fleet:
        for named, host in (("evil.example", "127.0.0.1"), ("127.0.0.1", "evil.example")):
            said = await ask(fleet.url, f"GET http://{named}/metrics HTTP/1.1", [("Host", host)])
            assert said.status == 400


@pytest.mark.security("S3")
async def test_the_page_of_metrics_has_the_headers_of_every_answer(launch: Launch) -> None:
    async with launch() as fleet:
        said = await ask(fleet.url, "GET /metrics HTTP/1.1")

        assert said.status == 200
        assert said.headers["Server"] == "epd"
        assert said.headers["X-Request-Id"]
        assert said.headers["Content-Type"].startswith("text/plain")


@pytest.mark.security("S6")
@pytest.mark.parametrize("field", ["mm_processor_kwargs", "media_io_kwargs"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/media"])
async def test_kwargs_of_the_media_processor_need_trust(
    launch: Launch, tmp_path: Path, field: str, path: str
) -> None:
    asked: dict[str, Any] = {"model": "m", field: {"image": {"max_pixels": 10**9}}}
    part = {"type": "image_url", "image_url": {"url": "https://host/cat.png"}}
    more = {"content": [part]} if path == "/v1/media" else {"messages": [{"content": [part]}]}
    async with launch(ec_store=f"file://{tmp_path}/store") as fleet:
        async with fleet.http.post(fleet.url + path, json=asked | more) as reply:
            error = (await reply.json())["error"]

        assert (reply.status, error["param"]) == (400, field)
        assert reply.headers["x-epd-error"] == "reserved_field"
        assert fleet.e.calls == fleet.d.calls == []


@pytest.mark.security("S6")
@pytest.mark.parametrize("empty", [None, {}])
async def test_empty_kwargs_are_accepted_as_by_an_engine(
    launch: Launch, empty: dict[str, Any] | None
) -> None:
    async with launch() as fleet:
        body: dict[str, Any] = {
            "messages": [],
            "mm_processor_kwargs": empty,
            "media_io_kwargs": empty,
        }

        assert (await fleet.chat(body))[0] == 200
