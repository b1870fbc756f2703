"""`/policies`: the coordination policies in force. Docstrings are published (see `openapi.py`)."""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from aiohttp import web

from epd.api.body import parse_object
from epd.errors import BadRequest, RequestRefused
from epd.policies.in_force import Policies
from epd.policies.registry import known_names
from epd.server.app_keys import VISIT
from epd.server.intake import read_json
from epd.server.responses import JsonResponse, as_json

POLICIES = web.AppKey("policies", Policies)


class PolicyRow(TypedDict):
    """One policy in force."""

    policy: str
    """The policy in text form: `name?option=value`."""
    name: str
    options: Mapping[str, Any]


_Source = TypedDict("_Source", {"from": Literal["configuration", "api"]})


class PoliciesPage(_Source):
    """Policies in force, in order of priority, their source, and the known policies."""

    policies: list[PolicyRow]
    known: list[str]


async def list_policies(request: web.Request) -> JsonResponse[PoliciesPage]:
    """List the coordination policies in force.

    They are in order of priority: the first policy that applies to a request decides which stages
    run on which instances.

    Returns:
        200: policies in force.
    """
    return _in_force(request)


async def set_policies(request: web.Request) -> JsonResponse[PoliciesPage]:
    """Replace all policies in force.

    They apply to all workers, until the proxy ends.

    Returns:
        200: policies in force.

    Raises:
        BadRequest: the body is not JSON.
        RequestRefused: 422, the policies are invalid; nothing was changed.
        Overloaded: another process is changing the policies.
    """
    match parse_object(await read_json(request)):
        case {"policies": [*written], **rest} if not rest and all(
            isinstance(policy, str) for policy in written
        ):
            request.app[POLICIES].replace(written)
            return _in_force(request)
    raise _invalid('the body must be {"policies": ["name?option=value", ...]}')


async def add_policy(request: web.Request) -> JsonResponse[PoliciesPage]:
    """Add a policy, or change the options of one.

    Without a priority, a new policy becomes the first one, and a policy with other options keeps
    its place.

    Returns:
        200: policies in force.

    Raises:
        BadRequest: the body is not JSON.
        RequestRefused: 422, the policy is invalid; nothing was changed.
        Overloaded: another process is changing the policies.
    """
    match parse_object(await read_json(request)):
        case {"policy": str() as written, **rest} if rest.keys() <= {"priority"}:
            priority = rest.get("priority")
            if not (priority is None or (type(priority) is int and priority > 0)):
                raise _invalid("priority must be a whole number from 1, which is the first")
            request.app[POLICIES].add(written, priority)
            return _in_force(request)
    raise _invalid('the body must be {"policy": "name?option=value", "priority": 1}')


async def remove_policy(request: web.Request) -> JsonResponse[PoliciesPage]:
    """Remove a policy, or return to the configured policies.

    Without a name, the configured policies apply again.

    Returns:
        200: policies in force.

    Raises:
        BadRequest: the query is neither `name=…` nor empty.
        RequestRefused: 404, the policy is not in force.
        RequestRefused: 422, the policy is the only one; nothing was changed.
        Overloaded: another process is changing the policies.
    """
    match list(request.query.items()):
        case []:
            request.app[POLICIES].reset()
        case [("name", name)]:
            request.app[POLICIES].remove(name)
        case _:  # a mistyped query must not remove all policies
            raise BadRequest("the query must be name=… or empty", slug="invalid_policy")
    return _in_force(request)


def _in_force(request: web.Request) -> JsonResponse[PoliciesPage]:
    policies = request.app[POLICIES]
    rows = [
        PolicyRow(policy=policy.written, name=policy.name, options=policy.options)
        for policy in policies.active
    ]
    page: PoliciesPage = {"policies": rows, "from": policies.source, "known": known_names()}
    return as_json(page, request[VISIT].record)


def _invalid(message: str) -> RequestRefused:
    return RequestRefused(422, message, slug="invalid_policy")
