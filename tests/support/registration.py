"""Calls of `/instances`, and instances that register themselves."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from epd.routing.instances import Role
from tests.support.fake_instance import FakeInstance, decodes, encodes, prefills
from tests.support.fleet import Fleet, Launch

KEY = "admin-key-0123456789"

ADMIN = {"X-API-Key": KEY}

HANDLERS = {
    Role.ENCODE: encodes,
    Role.PREFILL: prefills,
    Role.DECODE: decodes,
    Role.PREFILL_DECODE: decodes,
}


@asynccontextmanager
async def empty(launch: Launch, **config: Any) -> AsyncIterator[Fleet]:
    """Run a proxy without instances that accepts registrations."""
    settings: dict[str, Any] = {"dynamic_registration": True, "admin_api_key": KEY} | config
    async with launch(encode=0, decode=0, **settings) as fleet:
        yield fleet


async def register(
    fleet: Fleet, body: Mapping[str, Any], headers: Mapping[str, str] = ADMIN
) -> tuple[int, dict[str, Any]]:
    async with fleet.http.post(f"{fleet.url}/instances", json=body, headers=headers) as reply:
        return reply.status, await reply.json()


async def unregister(
    fleet: Fleet, url: str, headers: Mapping[str, str] = ADMIN
) -> tuple[int, dict[str, Any]]:
    where = f"{fleet.url}/instances"
    async with fleet.http.delete(where, params={"url": url}, headers=headers) as reply:
        return reply.status, await reply.json()


async def listing(fleet: Fleet, headers: Mapping[str, str] = ADMIN) -> dict[str, Any]:
    async with fleet.http.get(f"{fleet.url}/instances", headers=headers) as reply:
        assert reply.status == 200
        page: dict[str, Any] = await reply.json()
        return page


@asynccontextmanager
async def taking_part(fleet: Fleet, role: Role, **more: Any) -> AsyncIterator[FakeInstance]:
    """Run an instance that is registered as a launcher would register it."""
    async with FakeInstance(HANDLERS[role]).running() as instance:
        status, said = await register(fleet, {"role": role, "url": instance.url, **more})
        assert (status, said) == (200, {"registered": True})
        yield instance
