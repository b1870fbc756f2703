"""OpenAPI document of the proxy, from its routes, their handlers, the endpoints and the errors.

A handler's docstring, or that of an endpoint's class, has the summary and the description of an
operation. Its `Returns` and `Raises` have the statuses: `200: the policies in force`,
`RequestRefused: 404, the policy is not in force`. The class of access has those of a rejected key.
The type of a `JsonResponse` is the schema of the body. openapi.yaml has what the code does not
state.
"""

import ast
import builtins
import inspect
import re
import sys
import textwrap
import types
import typing
from collections import Counter, abc
from collections.abc import Iterator, Mapping
from datetime import datetime
from enum import StrEnum
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import (
    Any,
    NamedTuple,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import orjson
import yaml
from aiohttp import web

from epd import errors
from epd.api.endpoint import Endpoint
from epd.api.endpoints import ENDPOINTS, is_api
from epd.api.messages import Messages
from epd.api.passthrough import Transcriptions
from epd.api.sse import ANTHROPIC, OPENAI, RESPONSES, Grammar
from epd.discovery.entries import Registration
from epd.edge import engine_headers
from epd.edge.access import Access
from epd.errors import ProxyError, RequestRefused, Stage, Unauthorized
from epd.routing.instances import Role
from epd.server.responses import JsonResponse
from epd.ui.state import UiState
from epd.version import __version__

PARTS = Path(__file__).with_name("openapi.yaml")

Json = dict[str, Any]
Routes = tuple[tuple[Access, web.RouteDef], ...]

SECTION = re.compile(r"^(Args|Attributes|Raises|Returns):$", re.MULTILINE)
ENTRY = re.compile(r"^    (\S+): (.*(?:\n     .*)*)", re.MULTILINE)
SEVERAL = re.compile(r"(\d{3}), (.+)", re.DOTALL)
PARAMETER = re.compile(r"\{(\w+)\}")

TAGS = {
    Access.OPEN: "public",
    Access.TENANT: "clients",
    Access.ADMIN: "operator",
    Access.REGISTRAR: "operator",
}
ADMIN_KEYS: tuple[Json, ...] = ({"adminKey": []}, {"adminBearer": []})
SECURITY: Mapping[Access, list[Json]] = {
    Access.OPEN: [],
    Access.TENANT: [{}, {"apiKey": []}],
    Access.ADMIN: [{}, *ADMIN_KEYS],
    Access.REGISTRAR: [*ADMIN_KEYS],
}
DENIALS: Mapping[Access, Mapping[str, str]] = {
    Access.OPEN: {},
    Access.TENANT: {
        "401": "The request has no API key, or an invalid one",
        "403": "An instance rejects the API key",
    },
    Access.ADMIN: {
        "401": "The request lacks the configured admin key",
        "403": "No admin key is configured, and the request comes from another machine",
    },
    Access.REGISTRAR: {"403": "The request lacks the admin key, or none is configured"},
}
ENDS: Mapping[Grammar, str] = {
    OPENAI: "`[DONE]`",
    RESPONSES: "`response.completed`, `response.incomplete` or `response.failed`",
    ANTHROPIC: "`message_stop`",
}
"""Last event of a stream."""

SHAPES = {"Error": "OpenAI's", "AnthropicError": "Anthropic's"}

MODEL = {"type": ["string", "null"], "description": "Name of the served model"}
PLAIN: Mapping[object, Json] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    datetime: {"type": "string", "format": "date-time"},
    types.NoneType: {"type": "null"},
    Any: {},
}


class Undescribed(ValueError):
    """The code or openapi.yaml lacks a description, or describes something unknown."""


class Documented(NamedTuple):
    """Content of a docstring.

    Attributes:
        summary: first paragraph.
        description: paragraphs between the summary and the first section.
        sections: entries of each section, as name and text.
    """

    summary: str
    description: str
    sections: Mapping[str, list[tuple[str, str]]]


def openapi_json(routes: Routes, prefix: str | None) -> bytes:
    """Return the document of these routes as JSON.

    Args:
        routes: routes with their classes of access.
        prefix: path prefix of all routes.

    Raises:
        Undescribed: as `document`.
    """
    made = document(routes, yaml.safe_load(PARTS.read_bytes()))
    return orjson.dumps(made if prefix is None else {**made, "servers": [{"url": prefix}]})


def document(routes: Routes, parts: Json) -> Json:
    """Return the document of these routes.

    Args:
        routes: routes with their classes of access.
        parts: content of openapi.yaml.

    Raises:
        Undescribed: a route has no description, or a part describes no route.
    """
    schemas = Schemas(parts["schemas"])
    left = dict(parts["operations"])
    shared = Counter(route.handler for _, route in routes)
    paths: Json = {}
    for access, route in routes:
        extra = left.pop(f"{route.method} {route.path}", {})
        made = Operation(access, route, extra, schemas).as_json()
        if "operationId" not in made:
            name = getattr(route.handler, "__name__", "")
            several = shared[route.handler] > 1
            made = {"operationId": f"{name}_{route.method.lower()}" if several else name, **made}
        found = [*dict.fromkeys(PARAMETER.findall(route.path))]
        if unknown := [name for name in found if name not in parts["path_parameters"]]:
            raise Undescribed(f"{route.path}: openapi.yaml has no {unknown[0]}")
        own = [
            {
                "name": parameter,
                "in": "path",
                "required": True,
                "schema": parts["path_parameters"][parameter],
            }
            for parameter in found
        ]
        if parameters := own + extra.get("parameters", []):
            made["parameters"] = parameters
        paths.setdefault(route.path, {})[route.method.lower()] = made
    if left:
        raise Undescribed(f"openapi.yaml describes no route: {', '.join(left)}")
    schemas.add(UiState)
    schemas.add_registration()
    return {
        "openapi": "3.1.0",
        "info": {**parts["info"], "version": __version__},
        "security": SECURITY[Access.TENANT],
        "paths": paths,
        "components": {
            "securitySchemes": parts["securitySchemes"],
            "headers": parts["headers"] | {"x-epd-stage": _stage_header()},
            "responses": {
                f"{name}{status}": _error(f"Error in {whose} shape\n\n{_listed(texts)}", name)
                for name, whose in SHAPES.items()
                for status, texts in {"": [], **work_errors()}.items()
            },
            "schemas": schemas.made,
        },
    }


def _stage_header() -> Json:
    return {
        "description": "Stage that caused the error",
        "required": True,
        "schema": {"enum": [*get_args(Stage)]},
    }


def _error(description: str, schema: str) -> Json:
    names = ("X-Request-Id", "X-Trace-Id", "Retry-After", "x-epd-stage", "x-epd-error")
    return {"description": description.strip(), "headers": _headers(*names)} | _json(_ref(schema))


def _json(schema: Json) -> Json:
    return {"content": {"application/json": {"schema": schema}}}


def _ref(name: str, kind: str = "schemas") -> Json:
    return {"$ref": f"#/components/{kind}/{name}"}


def _headers(*names: str) -> Json:
    return {name: _ref(name, "headers") for name in names}


class Operation:
    """Description of one route."""

    def __init__(
        self, access: Access, route: web.RouteDef, extra: Json, schemas: "Schemas"
    ) -> None:
        """Describe a route.

        Args:
            access: class of access.
            route: route.
            extra: part of openapi.yaml about it.
            schemas: schemas of the document, to which those of the route are added.
        """
        self._access = access
        self._route = route
        self._extra = extra
        self._schemas = schemas
        self._endpoint = ENDPOINTS.get(route.path)
        subject = route.handler if self._endpoint is None else type(self._endpoint)
        self._documentation = documented(subject, f"{route.method} {route.path}")

    def as_json(self) -> Json:
        """Return the description, without parameters.

        Raises:
            Undescribed: something is not described.
        """
        documentation, extra, endpoint = self._documentation, self._extra, self._endpoint
        made: Json = {key: extra[key] for key in ("operationId",) if key in extra}
        made |= {"tags": [TAGS[self._access]], "summary": documentation.summary}
        description = documentation.description
        if endpoint is not None and endpoint.key_header != "Authorization":
            more = f"An API key may also be sent as `{endpoint.key_header}`."
            description = f"{description}\n\n{more}".strip()
            made["security"] = [*SECURITY[self._access], {"messagesKey": []}]
        elif self._access is not Access.TENANT:
            made["security"] = SECURITY[self._access]
        if description:
            made["description"] = description
        if endpoint is not None:
            made["requestBody"] = self._endpoint_body(endpoint)
        elif "requestBody" in extra:
            required = extra["requestBody"] != {}
            made["requestBody"] = {"required": required, **_json(extra["requestBody"])}
        made["responses"] = {**self._answers(), **self._errors()}
        return made

    def _endpoint_body(self, endpoint: Endpoint) -> Json:
        is_form = isinstance(endpoint, Transcriptions)
        media_type = "multipart/form-data" if is_form else "application/json"
        schema = self._schemas.add_request(endpoint)
        return {"required": True, "content": {media_type: {"schema": schema}}}

    def _answers(self) -> Json:
        """Return the responses that are no errors, by status."""
        if self._endpoint is not None:
            return {"200": self._relayed(self._endpoint)}
        statuses = self._documentation.sections.get("Returns", [])
        if not statuses and self._returns() is not web.StreamResponse:
            raise Undescribed(f"{self._name}: the docstring has no `Returns:` with statuses")
        own = ("X-Trace-Id",) if is_api(self._route.path) else ()
        found: Json = {}
        for status, text in statuses:
            names = ("X-Request-Id", *own, *(("Location",) if status == "302" else ()))
            found[status] = {"description": _sentence(text), "headers": _headers(*names)}
            if content := self._content():
                found[status]["content"] = content
        return found

    @property
    def _name(self) -> str:
        return f"{self._route.method} {self._route.path}"

    def _returns(self) -> Any:
        return get_type_hints(self._route.handler)["return"]

    def _content(self) -> Json:
        returns = self._returns()
        if get_origin(returns) is JsonResponse:
            content: Json = _json(self._schemas.of(*get_args(returns)))["content"]
            return content
        if "content" not in self._extra:
            raise Undescribed(f"{self._name}: it returns no JsonResponse, and has no `content`")
        stated: Json = self._extra["content"]
        return stated

    def _relayed(self, endpoint: Endpoint) -> Json:
        names = ["X-Request-Id", "X-Trace-Id"][: 1 + is_api(endpoint.path)]
        names += ["Server-Timing", engine_headers.LOAD, engine_headers.METADATA]
        if type(endpoint).items is not Endpoint.items:
            names += ["x-epd-items"] * endpoint.encodes + ["x-epd-media"]
        if endpoint.generates:
            names += ["x-epd-degraded"]
        text, content = "Response of the decode instance, unchanged", _json({"type": "object"})
        is_form = isinstance(endpoint, Transcriptions)
        if is_form:
            content["content"]["text/plain"] = {}
        if endpoint.generates or is_form:
            content["content"]["text/event-stream"] = {}
            text += "; with `stream`, server-sent events that end with "
            text += f"{ENDS[endpoint.grammar]}, or with an event that has an `error`"
        return {"description": text, "headers": _headers(*names), **content}

    def _errors(self) -> Json:
        """Return the errors of a route: of its handler, its class of access, and the stages."""
        name = "AnthropicError" if isinstance(self._endpoint, Messages) else "Error"
        shape = _ref(name, "responses")
        found: dict[str, list[str]] = {}
        for status, text in chain(DENIALS[self._access].items(), self._raised()):
            found.setdefault(status, []).append(text)
        made: Json = {
            status: {**shape, "description": _listed(texts)} for status, texts in found.items()
        }
        if self._access is Access.TENANT and self._route.method == "POST":  # see `serve_request`
            for status, texts in work_errors().items():
                if status in found:
                    made[status]["description"] = _listed([*found[status], *texts])
                else:
                    made[status] = _ref(f"{name}{status}", "responses")
        if self._access is not Access.OPEN:  # the others state all their errors
            made |= {"4XX": shape, "5XX": shape}
        return dict(sorted(made.items()))

    def _raised(self) -> Iterator[tuple[str, str]]:
        """Yield status and cause of the errors in the docstring of the handler.

        Raises:
            Undescribed: an error is unknown, or its status.
        """
        for name, text in self._documentation.sections.get("Raises", []):
            kind = getattr(errors, name, None)
            if not (isinstance(kind, type) and issubclass(kind, ProxyError)):
                raise Undescribed(f"{self._name}: {name} is no error of epd.errors")
            if kind is not RequestRefused:
                yield str(kind.status), _sentence(text)
            elif (stated := SEVERAL.fullmatch(text)) is not None:
                yield stated[1], _sentence(stated[2])
            else:
                raise Undescribed(f"{self._name}: {name} has no status in the docstring")


@cache
def work_errors() -> Mapping[str, list[str]]:
    """Return the errors of requests that the stages serve, by status, from their classes.

    An error that has a status only in a request's course, such as that of an instance, is not
    among them.
    """
    kinds: list[type[ProxyError]] = [ProxyError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    found: dict[str, list[str]] = {}
    for kind in kinds:
        stated = kind.status != ProxyError.status and kind is not Unauthorized
        if kind.__module__ == errors.__name__ and stated:
            summary, slug = documented(kind, kind.__name__).summary, vars(kind).get("default_slug")
            found.setdefault(str(kind.status), []).append(
                f"`{slug}`: {summary}" if slug else summary
            )
    return found


class Schemas:
    """Schemas of the document: those of the components, and those of Python's types."""

    def __init__(self, parts: Json) -> None:
        self.made: Json = dict(parts)
        self._types: dict[str, object] = {}

    def of(self, kind: Any) -> Json:
        """Return the schema of a type, by reference if it has a name.

        Raises:
            Undescribed: the type has no schema.
        """
        if kind in PLAIN:
            return dict(PLAIN[kind])
        args = get_args(kind)
        match get_origin(kind):
            case typing.Literal:
                made: Json = {"enum": [*args]} if len(args) > 1 else {"const": args[0]}
            case typing.Union | types.UnionType:
                found = [self.of(argument) for argument in args]
                plain = all(schema.keys() == {"type"} for schema in found)
                made = {"type": [schema["type"] for schema in found]} if plain else {"anyOf": found}
            case builtins.list:
                made = {"type": "array", "items": self.of(args[0])}
            case builtins.dict | abc.Mapping:
                named = {} if args[0] is str else {"propertyNames": self.of(args[0])}
                made = {"type": "object", **named, "additionalProperties": self.of(args[1])}
            case _:
                made = self.add(kind)
        return made

    def add(self, kind: Any) -> Json:
        """Add the schema of a class, and return a reference to it.

        Raises:
            Undescribed: the class has no schema, or its name has two.
        """
        if not (is_typeddict(kind) or (isinstance(kind, type) and issubclass(kind, StrEnum))):
            raise Undescribed(f"{kind} has no schema")
        # The page's names are too short for a document about more than the page.
        page = kind.__module__.startswith("epd.ui.") and not kind.__name__.startswith("Ui")
        name = f"Ui{kind.__name__.removesuffix('Shown')}" if page else kind.__name__
        if name not in self.made:
            self._types[name] = kind
            self.made[name] = {}  # a type may refer to itself
            self.made[name] = self._object(kind) if is_typeddict(kind) else _enum(kind)
        elif self._types.get(name) is not kind:
            raise Undescribed(f"two schemas have the name {name}")
        return _ref(name)

    def _object(self, kind: Any) -> Json:
        descriptions, hints = _members(kind), get_type_hints(kind)
        properties = {}
        for name, of in hints.items():
            found = self.of(of)
            properties[name] = found | (
                {"description": descriptions[name]} if name in descriptions else {}
            )
        return {
            "type": "object",
            "description": _whole(documented(kind, kind.__name__)),
            "properties": properties,
            "required": [name for name in hints if name in kind.__required_keys__],
            "additionalProperties": False,
        }

    def add_registration(self) -> None:
        """Add the body of `POST /instances`, which is a pydantic model."""
        made = Registration.model_json_schema()
        defined = made.pop("$defs")
        if defined.keys() != {Role.__name__}:
            raise Undescribed(f"Registration has the schemas {', '.join(defined)}")
        descriptions = _members(Registration)
        for name, field in made["properties"].items():
            field.pop("title", None)
            if name in descriptions:
                field["description"] = descriptions[name]
        made["properties"]["role"] = self.add(Role)
        self.made["Registration"] = {key: made[key] for key in made if key != "title"}

    def add_request(self, endpoint: Endpoint) -> Json:
        """Add the fields that the proxy reads to an endpoint's schema; return a reference.

        Raises:
            Undescribed: the endpoint has no schema.
        """
        names = [f"{cls.__name__}Request" for cls in type(endpoint).__mro__]
        name = next((candidate for candidate in names if candidate in self.made), None)
        if name is None:
            raise Undescribed(f"openapi.yaml has no schema {names[0]}")
        fields: Json = {"model": MODEL}
        if endpoint.generates:
            fields["stream"] = {"type": ["boolean", "null"]}
            fields["conversation_id"] = {
                "type": ["string", "null"],
                "minLength": 1,
                "maxLength": 256,
                "description": "Client's name of the conversation that this turn belongs to",
            }
        if endpoint.salted:
            fields["cache_salt"] = {
                "type": ["string", "null"],
                "minLength": 1,
                "description": "Combined with the tenant's salt",
            }
        if isinstance(endpoint, Transcriptions):  # a form has strings
            fields = {"model": {"type": "string"}, "stream": {"type": "string"}}
        old = self.made[name]
        self.made[name] = old | {"properties": fields | old["properties"]}
        return _ref(name)


def _enum(kind: type[StrEnum]) -> Json:
    descriptions = _members(kind)
    lines = [_whole(documented(kind, kind.__name__))]
    lines += [
        f"- `{member.value}`: {descriptions[member.name]}"
        for member in kind
        if member.name in descriptions
    ]
    return {
        "type": "string",
        "enum": [member.value for member in kind],
        "description": "\n".join(lines),
    }


def _members(kind: type) -> dict[str, str]:
    """Return the strings below the members of a class and of its bases, by the member's name."""
    found: dict[str, str] = {}
    [defined] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    if not isinstance(defined, ast.ClassDef):  # a TypedDict made by a call
        return found
    # The bases as they are written: a TypedDict has only `dict` as a base.
    for written in (base.id for base in defined.bases if isinstance(base, ast.Name)):
        base = vars(sys.modules[kind.__module__])[written]
        if isinstance(base, type) and base.__module__ == kind.__module__ and written[0] != "_":
            found |= _members(base)
    for member, text in pairwise(defined.body):
        match member, text:
            case (
                ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(ast.Constant(value=str() as description)),
            ):
                found[name] = " ".join(description.split())
            case _:
                pass
    return found


def documented(subject: Any, name: str) -> Documented:
    """Return the content of the docstring of an object.

    Args:
        subject: object.
        name: name of it for an error.

    Raises:
        Undescribed: it has no docstring of its own.
    """
    text = inspect.cleandoc(subject.__doc__ or "")
    if not text or getattr(subject, "__doc__", None) == type(subject).__doc__:
        raise Undescribed(f"{name} has no docstring: it is the description")
    prose, *sections = SECTION.split(text)
    first, _, rest = prose.strip().partition("\n\n")
    paragraphs = [
        " ".join(paragraph.split()) for paragraph in rest.split("\n\n") if paragraph.strip()
    ]
    return Documented(
        " ".join(first.split()).removesuffix("."),
        "\n\n".join(paragraphs),
        {
            title: [(key, " ".join(text.split())) for key, text in ENTRY.findall(body)]
            for title, body in zip(sections[::2], sections[1::2], strict=True)
        },
    )


def _whole(documentation: Documented) -> str:
    return f"{documentation.summary}. {documentation.description}".strip()


def _listed(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else "\n".join(f"- {text}" for text in texts)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].removesuffix(".")
