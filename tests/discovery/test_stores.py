"""Stores of registrations: one contract for all backends, and the effect of their faults."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from epd.discovery.membership import Clash, Registrations
from epd.discovery.stores import (
    REGISTERED,
    Edit,
    InFolder,
    InProcess,
    LockedFolder,
    RegistrationsInRedis,
    RegistrationStore,
    StoreFailed,
)
from epd.routing.instances import Instance, Role
from epd.routing.registry import Registry
from epd.routing.table import InstanceTable
from tests.support.redis_server import RedisServer

A, B, C = (Instance(Role.ENCODE, f"http://{name}:1") for name in "abc")
WIDE = Instance(Role.PREFILL_DECODE, "http://pd:1", dp_size=4)


@asynccontextmanager
async def opened(kind: str, folder: Path) -> AsyncIterator[RegistrationStore]:
    if kind == "process":
        yield InProcess()
    elif kind == "folder":
        yield InFolder(LockedFolder(folder / "registrations"))
    else:
        with RedisServer(folder / "redis") as server:
            async with RegistrationsInRedis.connected(server.url("key=fleet:instances")) as store:
                yield store


@pytest.fixture(params=["process", "folder", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RegistrationStore]:
    async with opened(request.param, tmp_path) as opened_store:
        yield opened_store


async def test_a_registration_is_read_until_it_is_dropped(
    store: RegistrationStore,
) -> None:
    assert not await store.read()
    assert await store.write((), Edit(A.url, A)) == (A,)
    await store.write((A,), Edit(WIDE.url, WIDE))
    wider = Instance(WIDE.role, WIDE.url, dp_size=8)
    await store.write((A, WIDE), Edit(wider.url, wider))
    assert set(await store.read() or ()) == {A, wider}
    await store.write((A, wider), Edit(A.url))
    await store.write((wider,), Edit(wider.url))

    assert await store.read() == ()


async def test_concurrent_writers_lose_no_registration(store: RegistrationStore) -> None:
    many = [Instance(Role.ENCODE, f"http://e{number}:1") for number in range(20)]
    await asyncio.gather(*(store.write((), Edit(one.url, one)) for one in many))

    assert set(await store.read() or ()) == set(many)


def watched(store: RegistrationStore) -> tuple[Registrations, InstanceTable]:
    table = InstanceTable()
    return Registrations(store, Registry(table)), table


async def test_registrations_are_visible_to_other_proxies(store: RegistrationStore) -> None:
    (one, _), (other, table) = watched(store), watched(store)
    assert await one.add(A)
    await other.refresh_store()
    assert table.of_roles(*Role) == (A,)
    assert not await other.add(A)
    assert await other.remove(A.url)
    assert not await one.remove(A.url)
    await one.add(Instance(Role.DECODE, "http://d:1"))
    with pytest.raises(Clash):
        await other.add(WIDE)


@pytest.mark.parametrize(
    "content", [None, b"", b"\x00garbage", b"[]", b'{"version": 9, "instances": []}', b"{" * 9999]
)
async def test_a_lost_or_damaged_file_removes_no_instance_and_is_repaired(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / REGISTERED
    registrations, table = watched(InFolder(LockedFolder(tmp_path)))
    await registrations.add(A)
    await registrations.add(B)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    await registrations.refresh_store()
    assert set(table.of_roles(*Role)) == {A, B}
    if content is not None:
        with pytest.raises(StoreFailed, match=REGISTERED):
            await registrations.add(C)
        path.unlink()
    assert await registrations.add(C)
    assert set(table.of_roles(*Role)) == {A, B, C}

    rows = json.loads(path.read_bytes())["instances"]
    assert [row["url"] for row in rows] == [A.url, B.url, C.url]


async def test_a_folder_that_cannot_be_written_refuses_and_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "registrations"
    folder.write_text("no folder")
    registrations, table = watched(InFolder(LockedFolder(folder)))
    with pytest.raises(StoreFailed):
        await registrations.add(A)

    assert table.of_roles(*Role) == ()


async def test_a_lock_is_free_again_when_its_holder_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from epd.discovery.stores import LockedFolder\n"
        f"with LockedFolder(Path({str(tmp_path)!r})).hold_lock():\n"
        "    print('locked', flush=True); sys.stdin.read()"
    )
    holder = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"locked\n"
    writing = asyncio.create_task(InFolder(LockedFolder(tmp_path)).write((), Edit(A.url, A)))
    await asyncio.sleep(0.1)
    assert not writing.done()
    holder.kill()
    await holder.wait()

    assert await writing == (A,)


async def test_a_redis_that_restarts_empty_removes_no_instance(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        async with (
            RegistrationsInRedis.connected(server.url()) as first,
            RegistrationsInRedis.connected(server.url()) as second,
        ):
            (one, table), (other, others) = watched(first), watched(second)
            await one.add(A)
            await one.add(B)
            await other.refresh_store()
            server.kill()
            await one.refresh_store()
            with pytest.raises(StoreFailed):
                await one.add(C)
            assert set(table.of_roles(*Role)) == {A, B}
            server.start()
            await one.refresh_store()
            assert set(await first.read() or ()) == {A, B}
            await one.remove(A.url)
            await other.refresh_store()

            assert set(table.of_roles(*Role)) == set(others.of_roles(*Role)) == {B}


async def test_a_cancelled_redis_watch_ends_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd.discovery.membership.POLL_S", 0)
    with RedisServer(tmp_path / "redis") as server:
        for steps in range(40):  # steps of the event loop: a connect and some reads
            async with RegistrationsInRedis.connected(server.url()) as store:
                following = asyncio.create_task(watched(store)[0].poll_periodically())
                for _ in range(steps):
                    await asyncio.sleep(0)
                following.cancel()
                ended, _ = await asyncio.wait({following}, timeout=30)
                assert ended


async def test_invalid_values_in_redis_remove_no_instance(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        async with RegistrationsInRedis.connected(server.url()) as store:
            registrations, table = watched(store)
            await registrations.add(A)
            server.command("HSET", "epd:instances", "http://x:1", "garbage")
            await registrations.refresh_store()
            assert table.of_roles(*Role) == (A,)
            server.command("DEL", "epd:instances")
            server.command("SET", "epd:instances", "not even a hash")
            await registrations.refresh_store()

            assert table.of_roles(*Role) == (A,)
