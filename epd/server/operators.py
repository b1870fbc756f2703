"""What operators ask, and what asks for them: probes, figures, who takes part, what runs where."""

from functools import cache
from pathlib import Path

import orjson
from aiohttp import web

from epd.bodies.parsing import check_json_type, parse_json
from epd.edge.drain import DRAIN
from epd.errors import BadRequest, NoInstance, Overloaded
from epd.routing.instances import ANSWERING
from epd.server.admittance import may_administer, read, read_json
from epd.server.answers import as_json, own_headers
from epd.server.assembly import ADMIN, METRICS, POLICIES, ROSTER, TABLE
from epd.server.keys import check_key
from epd.server.visit import VISIT
from epd.version import __version__

OPENAPI = Path(__file__).with_name("openapi.json").read_bytes()


async def health(request: web.Request) -> web.Response:
    """`GET /health`: asks every instance."""
    status, body = await request.app[ADMIN].health()
    return as_json(body, request[VISIT].context, status)


async def version(request: web.Request) -> web.Response:
    """`GET /version`: the proxy's, and of each instance vLLM's."""
    await check_key(request)
    instances = await request.app[ADMIN].versions()
    return as_json({"version": __version__, "instances": instances}, request[VISIT].context)


async def openapi(request: web.Request) -> web.Response:
    """`GET /openapi.json`: what there is to be asked."""
    context = request[VISIT].context
    headers, prefix = own_headers(context), context.config.root_path
    body = OPENAPI if prefix is None else _served_under(prefix)
    return web.Response(body=body, content_type="application/json", headers=headers)


@cache
def _served_under(prefix: str) -> bytes:
    """The document of a proxy whose routes are below a prefix."""
    return orjson.dumps({**orjson.loads(OPENAPI), "servers": [{"url": prefix}]})


async def ready(request: web.Request) -> web.Response:
    """`/ready`, `/ping`: whether to send requests here. It asks nobody, and may be asked often."""
    if request.app[DRAIN].began:
        raise Overloaded("the proxy is about to stop", slug="shutting_down")
    decodes = request.app[TABLE].met(*ANSWERING) or request.app[POLICIES].decodes_elsewhere
    if not decodes:
        raise NoInstance("no decode instance can be reached", slug="no_decode")
    return as_json({"status": "ready"}, request[VISIT].context)


async def metrics(request: web.Request) -> web.Response:
    """`GET /metrics`, for Prometheus."""
    accept = request.headers.get("Accept", "")
    page, content_type = await request.app[METRICS].page_of_all(accept)
    headers = own_headers(request[VISIT].context) | {"Content-Type": content_type}
    return web.Response(body=page, headers=headers)


async def instances(request: web.Request) -> web.Response:
    """`GET /instances`: who takes part; to who has the admin key, in detail."""
    page = request.app[ROSTER].page(detailed=may_administer(request))
    return as_json(page, request[VISIT].context)


async def register(request: web.Request) -> web.Response:
    """`POST /instances`: lets an instance take part."""
    body = await read_json(request)
    return as_json(await request.app[ROSTER].register(bytes(body)), request[VISIT].context)


async def unregister(request: web.Request) -> web.Response:
    """`DELETE /instances?url=…`: takes that back."""
    url = request.query.get("url")
    return as_json(await request.app[ROSTER].unregister(url), request[VISIT].context)


async def policies(request: web.Request) -> web.Response:
    """`GET /policies`: which are in force."""
    return as_json(request.app[POLICIES].page(), request[VISIT].context)


async def set_policies(request: web.Request) -> web.Response:
    """`PUT /policies`: has these in force, and no others."""
    body = await read_json(request)
    return as_json(request.app[POLICIES].replace(bytes(body)), request[VISIT].context)


async def add_policy(request: web.Request) -> web.Response:
    """`POST /policies`: has one more in force, or one with other options."""
    body = await read_json(request)
    return as_json(request.app[POLICIES].add(bytes(body)), request[VISIT].context)


async def remove_policy(request: web.Request) -> web.Response:
    """`DELETE /policies?name=…`: has one in force no longer; without a name, undoes all."""
    match list(request.query.items()):
        case []:
            name = None
        case [("name", name)]:
            pass
        case _:  # mistyped, it must not undo all
            raise BadRequest("the query may be name=…, or empty", slug="invalid_policy")
    return as_json(request.app[POLICIES].remove(name), request[VISIT].context)


async def profile(command: str, request: web.Request) -> web.Response:
    """`POST /start_profile` and `/stop_profile`: tells every instance."""
    body = await read(request)
    if body:
        check_json_type(request.headers.get("Content-Type", ""))
        parse_json(body)
    context = request[VISIT].context
    headers = context.headers_for(context.request_id)
    return as_json(await request.app[ADMIN].profile(command, headers, bytes(body)), context)
