"""`epd/server/openapi.py` makes the OpenAPI document, and fails if something is undescribed."""

import copy
import json
import re
from typing import Any

import pytest
import schemathesis
import yaml
from aiohttp import web
from jsonschema_rs import ValidationError

from epd.edge.access import Access
from epd.server.app import ROUTES
from epd.server.openapi import PARTS, Undescribed, document
from epd.server.responses import JsonResponse

REFERENCE = re.compile(r'"#/components/(\w+)/([\w.-]+)')


@pytest.fixture
def parts() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(PARTS.read_text())
    return found


def with_route(handler: Any, path: str = "/new") -> Any:
    return (*ROUTES, (Access.OPEN, web.get(path, handler)))


async def bare(request: web.Request) -> web.Response:
    raise NotImplementedError


async def without_statuses(request: web.Request) -> JsonResponse[dict[str, int]]:
    """Return numbers."""
    raise NotImplementedError


async def numbers(request: web.Request) -> JsonResponse[dict[str, int]]:
    """Return numbers.

    Some are large.

    Returns:
        200: the numbers.

    Raises:
        Overloaded: there are too many.
        RequestRefused: 409, two
            are equal.
    """
    raise NotImplementedError


async def plain(request: web.Request) -> web.Response:
    """Return numbers.

    Returns:
        200: the numbers.
    """
    raise NotImplementedError


async def unknown_error(request: web.Request) -> JsonResponse[dict[str, int]]:
    """Return numbers.

    Returns:
        200: the numbers.

    Raises:
        KeyError: there are none.
    """
    raise NotImplementedError


async def no_status(request: web.Request) -> JsonResponse[dict[str, int]]:
    """Return numbers.

    Returns:
        200: the numbers.

    Raises:
        RequestRefused: there are none.
    """
    raise NotImplementedError


def test_the_document_is_valid(parts: dict[str, Any]) -> None:
    made = document(ROUTES, parts)
    schemathesis.openapi.from_dict(made).validate()

    broken = copy.deepcopy(made)
    del broken["paths"]["/health"]["get"]["responses"]["200"]["description"]
    with pytest.raises(ValidationError, match="description"):
        schemathesis.openapi.from_dict(broken).validate()


def test_a_new_route_is_described_by_its_handler(parts: dict[str, Any]) -> None:
    made = document(with_route(numbers), parts)["paths"]["/new"]["get"]

    assert (made["operationId"], made["summary"]) == ("numbers", "Return numbers")
    assert made["description"] == "Some are large."
    assert {status: one["description"] for status, one in made["responses"].items()} == {
        "200": "The numbers",
        "409": "Two are equal",
        "503": "There are too many",
    }
    assert made["responses"]["200"]["content"]["application/json"]["schema"] == {
        "type": "object",
        "additionalProperties": {"type": "integer"},
    }


@pytest.mark.parametrize(
    ("handler", "path", "problem"),
    [
        (bare, "/new", "GET /new has no docstring"),
        (without_statuses, "/new", "GET /new: the docstring has no `Returns:` with statuses"),
        (plain, "/new", "GET /new: it returns no JsonResponse"),
        (unknown_error, "/new", "GET /new: KeyError is no error of epd.errors"),
        (no_status, "/new", "GET /new: RequestRefused has no status"),
        (numbers, "/new/{name}", "/new/{name}: openapi.yaml has no name"),
    ],
)
def test_a_route_without_a_description_fails(
    parts: dict[str, Any], handler: Any, path: str, problem: str
) -> None:
    with pytest.raises(Undescribed) as raised:
        document(with_route(handler, path), parts)

    assert problem in str(raised.value)


def test_a_part_about_no_route_fails(parts: dict[str, Any]) -> None:
    parts["operations"]["GET /old"] = {}

    with pytest.raises(Undescribed, match="describes no route: GET /old"):
        document(ROUTES, parts)


def test_an_endpoint_without_a_schema_fails(parts: dict[str, Any]) -> None:
    del parts["schemas"]["ScoreRequest"]

    with pytest.raises(Undescribed, match="has no schema ScoreRequest"):
        document(ROUTES, parts)


def test_every_component_is_used_and_every_reference_resolves(parts: dict[str, Any]) -> None:
    made = document(ROUTES, parts)
    defined = {
        (kind, name)
        for kind, named in made["components"].items()
        if kind != "securitySchemes"
        for name in named
    }

    assert set(REFERENCE.findall(json.dumps(made))) == defined


def test_two_schemas_with_one_name_fail(parts: dict[str, Any]) -> None:
    parts["schemas"]["HealthPage"] = {}

    with pytest.raises(Undescribed, match="two schemas have the name HealthPage"):
        document(ROUTES, parts)
