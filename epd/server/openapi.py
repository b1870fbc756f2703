"""OpenAPI document of the proxy: its routes, and the JSON of its own responses.

The first line of a handler's docstring is the summary of its operation, and the type of its
`JsonResponse` the schema. The instances describe the bodies of OpenAI's, Anthropic's and vLLM's
APIs. openapi.yaml has what the code does not state.
"""

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import orjson
import yaml
from aiohttp import web
from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from epd.api.endpoints import ENDPOINTS
from epd.api.messages import Messages
from epd.api.passthrough import Transcriptions
from epd.discovery.entries import Registration
from epd.edge.access import Access
from epd.server.responses import JsonResponse
from epd.version import __version__

PARTS = Path(__file__).with_name("openapi.yaml")

Json = dict[str, Any]
Routes = tuple[tuple[Access, web.RouteDef], ...]

PARAMETER = re.compile(r"\{(\w+)\}")
REFERENCE = "#/components/schemas/{model}"

ADMIN_KEYS: tuple[Json, ...] = ({"adminKey": []}, {"adminBearer": []})
SECURITY: Mapping[Access, list[Json]] = {
    Access.OPEN: [],
    Access.TENANT: [{}, {"apiKey": []}],
    Access.ADMIN: [{}, *ADMIN_KEYS],
    Access.REGISTRAR: [*ADMIN_KEYS],
}


def openapi_json(routes: Routes, prefix: str | None) -> bytes:
    """Return the document of these routes as JSON. All paths have the prefix."""
    parts: Json = yaml.safe_load(PARTS.read_bytes())
    components, operations = parts["components"], parts["operations"]
    bodies, schemas = _schemas(routes)
    components["schemas"] |= schemas
    paths: Json = {}
    for access, route in routes:
        written = operations.get(f"{route.method} {route.path}", {})
        body = bodies.get(route.handler, {"type": "object"})
        made = _operation(access, route, body, written)
        paths.setdefault(route.path, {})[route.method.lower()] = made
    return orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {**parts["info"], "version": __version__},
            "servers": [{"url": prefix or "/"}],
            "paths": paths,
            "components": components,
        }
    )


def _schemas(routes: Routes) -> tuple[Mapping[object, Json], Json]:
    """Return the schema of each handler's JSON response, and the schemas of all components."""
    described: list[tuple[object, JsonSchemaMode, TypeAdapter[Any]]] = [
        (Registration, "validation", TypeAdapter(Registration))
    ]
    for handler in dict.fromkeys(route.handler for _, route in routes):
        returned = get_type_hints(handler)["return"]
        if get_origin(returned) is JsonResponse:
            described.append((handler, "serialization", TypeAdapter(*get_args(returned))))
    found, components = TypeAdapter.json_schemas(described, ref_template=REFERENCE)
    return {handler: schema for (handler, _), schema in found.items()}, components["$defs"]


def _operation(access: Access, route: web.RouteDef, body: Json, written: Json) -> Json:
    """Return the description of a route, with what openapi.yaml states about it."""
    endpoint = ENDPOINTS.get(route.path)
    documentation = inspect.getdoc(route.handler if endpoint is None else type(endpoint)) or ""
    made: Json = {
        "operationId": route.method.lower() + re.sub(r"\W+", "_", route.path),
        "tags": [access.value],
        "summary": documentation.partition("\n")[0].removesuffix("."),
        "security": SECURITY[access],
        **written,
    }
    content = {"application/json": {"schema": body}}
    answer = {"description": "Response of the proxy", "content": content}
    made["responses"] = dict(written.get("responses", {"200": answer}))
    made["parameters"] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in PARAMETER.findall(route.path)
    ] + written.get("parameters", [])
    if endpoint is not None:
        form = isinstance(endpoint, Transcriptions)
        made["requestBody"] = {"$ref": f"#/components/requestBodies/{'Form' if form else 'Json'}"}
        made["responses"] = {"200": {"$ref": "#/components/responses/Engine"}}
        if endpoint.key_header != "Authorization":
            made["security"] = [*SECURITY[access], {"messagesKey": []}]
    shape = "AnthropicError" if isinstance(endpoint, Messages) else "Error"
    error = {"$ref": f"#/components/responses/{shape}"}
    made["responses"] |= {"4XX": error, "5XX": error}
    return made
