"""Cross-origin requests (CORS): the proxy's answers compared with vLLM's."""

from collections.abc import Iterable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.testclient import TestClient

import epd
from epd.edge.access import Access
from epd.server.app import ROUTES
from tests.requests import request, text
from tests.support.clients import ALICE, bearer
from tests.support.fleet import Fleet, Launch

PAGE = "https://chat.example.com"
OTHER = "https://evil.example"
ALLOWED: dict[str, Any] = {"allowed_origins": (PAGE,)}
ADMIN = "admin-key-0123456789"
WANTS = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}


def cross_origin(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    found = {name.lower(): value for name, value in headers}
    return {
        name: value
        for name, value in found.items()
        if name.startswith("access-control") or name == "vary"
    }


async def ask(
    fleet: Fleet, method: str, path: str, headers: dict[str, str], **more: Any
) -> tuple[int, dict[str, str]]:
    async with fleet.http.request(method, fleet.url + path, headers=headers, **more) as reply:
        return reply.status, cross_origin(reply.headers.items())


@pytest.mark.security("S27")
async def test_no_page_is_allowed_by_default(launch: Launch) -> None:
    async with launch() as fleet:
        status, preflight = await ask(fleet, "OPTIONS", "/v1/chat/completions", WANTS)
        body = request(text())
        _, answer = await ask(fleet, "POST", "/v1/chat/completions", {"Origin": PAGE}, json=body)

    assert (status, preflight, answer) == (405, {}, {})


SETTINGS: list[dict[str, Any]] = [
    {"allowed_origins": (PAGE,)},
    {"allowed_origins": ("*",)},
    {"allowed_origins": (PAGE, "http://localhost:3000")},
]
ASKED: list[dict[str, str]] = [
    WANTS,
    {**WANTS, "Origin": OTHER},
    {**WANTS, "Origin": "null"},
    {**WANTS, "Access-Control-Request-Headers": "content-type, x-own"},
    {**WANTS, "Access-Control-Request-Headers": "authorization"},
    {**WANTS, "Origin": OTHER, "Access-Control-Request-Headers": "authorization"},
]


@pytest.mark.parametrize("settings", SETTINGS)
async def test_preflights_and_answers_are_vllms(launch: Launch, settings: dict[str, Any]) -> None:
    """The reference is starlette's middleware, as vLLM adds it (`serve/middleware/register.py`)."""
    engine = Starlette()
    origins = settings["allowed_origins"]
    engine.add_middleware(
        CORSMiddleware, allow_origins=origins, allow_methods=("*",), allow_headers=("*",)
    )
    # A newer starlette also lists the method QUERY, which no route has.
    browser = TestClient(engine)
    async with launch(**settings) as fleet:
        for asked in ASKED:
            theirs = browser.options("/v1/models", headers=asked)
            said = cross_origin(theirs.headers.items())
            said["access-control-allow-methods"] = said["access-control-allow-methods"].replace(
                ", QUERY", ""
            )
            assert await ask(fleet, "OPTIONS", "/v1/models", asked) == (theirs.status_code, said)
        for origin in (PAGE, OTHER, None):
            headers = {} if origin is None else {"Origin": origin}
            expected = cross_origin(browser.get("/v1/models", headers=headers).headers.items())
            assert (await ask(fleet, "GET", "/v1/models", headers))[1] == expected


@pytest.mark.security("S27")
async def test_operators_routes_have_no_cors_headers(launch: Launch) -> None:
    closed = {route.path for access, route in ROUTES if access not in {Access.OPEN, Access.TENANT}}
    own = {"X-API-Key": ADMIN, "Origin": PAGE}
    async with launch(admin_api_key=ADMIN, dynamic_registration=True, **ALLOWED) as fleet:
        for path in closed:
            assert await ask(fleet, "OPTIONS", path, WANTS | own) == (405, {}), path
            for method in ("GET", "POST", "PUT", "DELETE"):
                assert (await ask(fleet, method, path, own, json={}))[1] == {}, path
        assert await ask(fleet, "OPTIONS", "/no/route", WANTS) == (404, {})


@pytest.mark.security("S1")
async def test_a_preflight_needs_no_key_and_the_request_after_it_does(
    launch: Launch, keys: Any
) -> None:
    path, body = "/v1/chat/completions", request(text())
    async with launch(api_keys_file=keys, **ALLOWED) as fleet:
        preflight, _ = await ask(fleet, "OPTIONS", path, WANTS)
        denied, told = await ask(fleet, "POST", path, {"Origin": PAGE}, json=body)
        served, _ = await ask(fleet, "POST", path, bearer(ALICE) | {"Origin": PAGE}, json=body)

    assert (preflight, denied, served) == (200, 401, 200)
    assert told["access-control-allow-origin"] == PAGE  # the page may read the reason
    assert len(fleet.d.calls) == 1


async def test_streams_and_errors_can_be_read_by_the_page(launch: Launch) -> None:
    path = "/v1/chat/completions"
    async with launch(**ALLOWED) as fleet:
        for body, status in ((request(text()) | {"stream": True}, 200), ({"messages": 1}, 400)):
            answered, said = await ask(fleet, "POST", path, {"Origin": PAGE}, json=body)
            assert answered == status
            assert said == {"access-control-allow-origin": PAGE, "vary": "Origin"}


async def test_a_refused_preflight_is_an_error_of_openais_shape(launch: Launch) -> None:
    async with (
        launch(**ALLOWED) as fleet,
        fleet.http.options(f"{fleet.url}/v1/models", headers=WANTS | {"Origin": OTHER}) as reply,
    ):
        error = (await reply.json())["error"]

    assert (error["message"], error["code"]) == ("Disallowed CORS origin", 400)
    assert reply.headers["x-epd-error"] == "cors_refused"


async def test_options_without_preflight_headers_is_answered_as_without_cors(
    launch: Launch,
) -> None:
    async with launch() as without, launch(**ALLOWED) as fleet:
        for path in ("/v1/models", "/v1/chat/completions", "/v1/media/x"):
            answers = []
            for one in (without, fleet):
                async with one.http.options(one.url + path) as reply:
                    answers.append((reply.status, reply.headers["Allow"]))
            assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"allowed_origins": "*"}, "not a JSON list"),
        ({"allowed_origins": '["https://a/"]'}, "not an origin"),
        ({"allowed_origins": '["null"]'}, "not an origin"),
        ({"allowed_origins": '["a.example"]'}, "not an origin"),
        ({"allowed_origins": "[1]"}, "valid string"),
    ],
)
def test_unsafe_settings_of_origins_are_refused(settings: dict[str, Any], message: str) -> None:
    urls = {"encode_servers_urls": "http://e:1", "decode_servers_urls": "http://d:1"}
    with pytest.raises(ValueError, match="(?s)" + message):
        epd.ProxyConfig.model_validate(urls | settings)
