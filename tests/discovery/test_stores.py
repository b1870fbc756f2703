"""Stores of registrations: one contract for all backends, and the effect of their faults."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from epd.discovery.redis_store import RegistrationsInRedis
from epd.discovery.registrations import Clash, Registrations
from epd.discovery.stores import Edit, RegistrationsOnPage, RegistrationStore, StoreFailed
from epd.discovery.watching import follow
from epd.routing.instances import Instance, Role
from epd.routing.registry import Registry
from epd.routing.table import InstanceTable
from epd.shared_page import SharedPage
from tests.support.redis_server import RedisServer

LOCKS = """
import sys
from epd.shared_page import SharedPage
with SharedPage(int(sys.argv[1])).hold_lock():
    print("locked", flush=True)
    sys.stdin.read()
"""

A, B, C = (Instance(Role.ENCODE, f"http://{name}:1") for name in "abc")
WIDE = Instance(Role.PREFILL_DECODE, "http://pd:1", dp_size=4)


@asynccontextmanager
async def opened(kind: str, folder: Path) -> AsyncIterator[RegistrationStore]:
    if kind == "workers":
        with closing(SharedPage.new_page()) as page:
            yield RegistrationsOnPage(page)
    else:
        with RedisServer(folder / "redis") as server:
            async with RegistrationsInRedis.connected(server.url("key=fleet:instances")) as store:
                yield store


@pytest.fixture(params=["workers", "redis"])
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


def watched(
    store: RegistrationStore, interval_s: float = 1.0
) -> tuple[Registrations, InstanceTable]:
    table = InstanceTable()
    return Registrations(store, Registry(table), interval_s), table


async def test_a_process_without_a_store_registers_for_itself() -> None:
    table = InstanceTable()
    alone = Registrations(None, Registry(table))

    assert await alone.add(A)
    assert not await alone.add(A)
    assert table.of_roles(*Role) == (A,)
    assert await alone.remove(A.url)
    assert not await alone.remove(A.url)
    assert table.of_roles(*Role) == ()


async def test_registrations_are_visible_to_other_proxies(store: RegistrationStore) -> None:
    (one, _), (other, table) = watched(store), watched(store)
    assert await one.add(A)
    await other.look()
    assert table.of_roles(*Role) == (A,)
    assert not await other.add(A)
    assert await other.remove(A.url)
    assert not await one.remove(A.url)
    await one.add(Instance(Role.DECODE, "http://d:1"))
    with pytest.raises(Clash):
        await other.add(WIDE)


async def test_a_page_that_another_process_locks_is_written_after_its_end() -> None:
    with closing(SharedPage.new_page()) as page:
        holder = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", LOCKS, str(page.descriptor)),
            pass_fds=[page.descriptor],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert holder.stdout is not None
        assert await holder.stdout.readline() == b"locked\n"
        store = RegistrationsOnPage(page)
        writing = asyncio.create_task(store.write((), Edit(A.url, A)))
        await asyncio.sleep(0.1)
        assert not writing.done()
        holder.kill()
        await holder.wait()

        assert await writing == await store.read() == (A,)


async def test_a_page_that_cannot_be_written_refuses_and_changes_nothing() -> None:
    with closing(SharedPage(os.open("/dev/null", os.O_RDONLY))) as page:
        registrations, table = watched(RegistrationsOnPage(page))
        with pytest.raises(StoreFailed):
            await registrations.add(A)

    assert table.of_roles(*Role) == ()


async def test_a_redis_that_restarts_empty_removes_no_instance(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        async with (
            RegistrationsInRedis.connected(server.url()) as first,
            RegistrationsInRedis.connected(server.url()) as second,
        ):
            (one, table), (other, others) = watched(first), watched(second)
            await one.add(A)
            await one.add(B)
            await other.look()
            server.kill()
            await one.look()
            with pytest.raises(StoreFailed):
                await one.add(C)
            assert set(table.of_roles(*Role)) == {A, B}
            server.start()
            await one.look()
            assert set(await first.read() or ()) == {A, B}
            await one.remove(A.url)
            await other.look()

            assert set(table.of_roles(*Role)) == set(others.of_roles(*Role)) == {B}


async def test_a_cancelled_redis_watch_ends_at_every_step(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        for steps in range(40):  # steps of the event loop: a connect and some reads
            async with RegistrationsInRedis.connected(server.url()) as store:
                following = asyncio.create_task(follow(watched(store, 0)[0], asyncio.Event()))
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
            await registrations.look()
            assert table.of_roles(*Role) == (A,)
            server.command("DEL", "epd:instances")
            server.command("SET", "epd:instances", "not even a hash")
            await registrations.look()

            assert table.of_roles(*Role) == (A,)
