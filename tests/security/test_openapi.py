"""`GET /openapi.json` describes every route, and every answer matches it."""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import schemathesis

# Imported here, since importing it in two threads at once fails on Python 3.11.
import schemathesis.specs.openapi.schemas
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode, Response
from schemathesis.core.result import Ok
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

import epd
from epd.api.endpoints import ENDPOINTS
from epd.edge.access import Access
from epd.server.app import ROUTES, openapi_document
from epd.version import __version__
from tests.security.wire import ask
from tests.support.backed import Backed
from tests.support.clients import bearer
from tests.support.fleet import Launch

DOCUMENT = json.loads(openapi_document())
METHODS = {"get", "post", "put", "patch", "delete"}
EXAMPLES = 12
"""Number of valid and of invalid requests for each operation."""
ADMIN = "admin-key-0123456789"

CONFORMS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
"""Checks of schemathesis that apply. Not among them: that all input that matches the schema is
accepted, and no other. The proxy checks what it needs, and leaves the rest to the engines."""

THEIRS = {502, 503, 504}
"""Statuses that the instances may cause; a 500 is always the proxy's own error."""


def described() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in DOCUMENT["paths"].items():
        for method in METHODS & item.keys():
            yield method.upper(), path, item[method]


def test_openapi_has_every_route_and_no_other() -> None:
    app = epd.create_app(
        epd.ProxyConfig(encode_servers_urls=("http://e:1",), decode_servers_urls=("http://d:1",))
    )
    served = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        # aiohttp adds HEAD to each GET; "*" is the handler of unknown routes.
        if route.resource is not None and route.method not in {"HEAD", "*"}
    }

    assert served == {(method, path) for method, path, _ in described()}


@pytest.mark.security("S3")
def test_the_document_states_the_keys_of_each_route() -> None:
    opened_by = {
        Access.OPEN: set(),
        Access.TENANT: {"apiKey"},
        Access.ADMIN: {"adminKey", "adminBearer"},
        Access.REGISTRAR: {"adminKey", "adminBearer"},
    }
    said = {
        (method, path): {name for one in operation["security"] for name in one}
        for method, path, operation in described()
    }

    own = {("POST", path) for path, it in ENDPOINTS.items() if it.key_header == "X-API-Key"}
    assert said == {
        key: opened_by[access] | ({"messagesKey"} if key in own else set())
        for access, route in ROUTES
        for key in [(route.method, route.path)]
    }


def test_openapi_states_this_version() -> None:
    assert DOCUMENT["info"]["version"] == __version__


@pytest.mark.parametrize("key", [None, "wrong"])
async def test_openapi_needs_no_key(launch: Launch, keys: Path, key: str | None) -> None:
    async with launch(api_keys_file=keys, admin_api_key=ADMIN) as fleet:
        answer = await ask(fleet.url, "GET /openapi.json HTTP/1.1", bearer(key or "").items())

        assert (answer.status, answer.body) == (200, openapi_document())


def check(response: Response, case: Case[Any]) -> None:
    """Check that the answer matches its description, and that an error names its origin."""
    case.validate_response(response, checks=CONFORMS)
    if response.status_code >= 400 and case.operation.path != "/health":
        assert response.status_code < 500 or response.status_code in THEIRS
        error = response.json()["error"]
        if not case.operation.path.startswith("/v1/messages"):  # Anthropic's shape has no code
            assert error["code"] == response.status_code
        assert re.search(r"Traceback|Error\(|0x[0-9a-f]{6}|<class", error["message"]) is None
        assert "x-epd-error" in response.headers


@dataclass
class Target:
    """Proxy under test.

    Attributes:
        url: its address.
        headers: headers of every request.
        statuses: statuses that it has answered.
    """

    url: str
    headers: dict[str, str]
    statuses: set[int] = field(default_factory=set)

    def ask(self, case: Case[Any]) -> None:
        response = case.call(base_url=self.url, headers=self.headers, timeout=120)
        self.statuses.add(response.status_code)
        check(response, case)


def ask_everything(*targets: Target) -> None:
    """Send all requests, valid and invalid, that schemathesis derives from the document.

    Generating them takes ten times as long as having them answered.
    """

    def ask_one(operation: APIOperation[Any, Any, Any, Any], mode: GenerationMode) -> None:
        @settings(
            max_examples=EXAMPLES,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def run(case: Case[Any]) -> None:
            for target in targets:
                target.ask(case)

        run()

    document = schemathesis.openapi.from_url(f"{targets[0].url}/openapi.json")
    for found in document.get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()
        ask_one(operation, GenerationMode.POSITIVE)
        try:
            ask_one(operation, GenerationMode.NEGATIVE)
        except Unsatisfiable:  # a request without described parameters cannot be invalid
            assert operation.path not in {*ENDPOINTS, "/v1/media"}


@pytest.mark.full
@pytest.mark.fault(50, 52)
@pytest.mark.security("S3")
# The proxies run in another thread than the strategies, and may draw random numbers meanwhile.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module")
async def test_every_response_and_every_error_matches_the_document(
    launch: Launch, backed: Backed, url: str, keys: Path
) -> None:
    async with (
        launch(ec_store=url) as opened,
        launch(api_keys_file=keys, admin_api_key=ADMIN) as closed,
    ):
        opened.e.chat = backed.encodes
        answers = Target(opened.url, {})
        refusals = Target(closed.url, {"X-API-Key": "wrong"})
        await asyncio.to_thread(ask_everything, answers, refusals)

        assert {200, 400, 404} <= answers.statuses
        assert 401 in refusals.statuses
        assert closed.e.calls == closed.d.calls == []
