"""The OpenAPI document is valid and complete. `tests/security` compares it with the responses."""

import json
import re
from typing import Any

import schemathesis
import yaml

from epd.server.app import ROUTES, openapi_document
from epd.server.openapi import PARTS

REFERENCE = re.compile(r'"#/components/(\w+)/([\w.-]+)')
DOCUMENT: dict[str, Any] = json.loads(openapi_document())


def test_the_document_is_valid() -> None:
    schemathesis.openapi.from_dict(DOCUMENT).validate()


def test_every_operation_has_a_summary_and_a_name_of_its_own() -> None:
    operations = [each for methods in DOCUMENT["paths"].values() for each in methods.values()]

    assert all(each["summary"] for each in operations)
    assert len({each["operationId"] for each in operations}) == len(operations) == len(ROUTES)


def test_every_stated_operation_is_a_route() -> None:
    stated = yaml.safe_load(PARTS.read_text())["operations"].keys()

    assert stated <= {f"{route.method} {route.path}" for _, route in ROUTES}


def test_every_component_is_used_and_every_reference_resolves() -> None:
    defined = {
        (kind, name)
        for kind, named in DOCUMENT["components"].items()
        if kind != "securitySchemes"
        for name in named
    }

    assert set(REFERENCE.findall(json.dumps(DOCUMENT))) == defined
