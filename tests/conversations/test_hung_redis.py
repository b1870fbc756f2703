"""Conversation and registration stores on a Redis that accepts connections and never answers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from epd.config import ProxyConfig
from epd.conversations.conversations import Conversations
from epd.conversations.stores import ConversationsInMemory, ConversationsInRedis
from epd.conversations.turn import Turn
from epd.discovery.redis_store import RegistrationsInRedis
from tests.support.fleet import until
from tests.support.redis_server import Certificates, RedisServer

DECODE = "http://d:2"
Asking = AbstractAsyncContextManager[Callable[[], Awaitable[object]]]

STEPS = 40
"""Steps of the event loop; more than connecting and sending take."""


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server, server.paused():
        yield server


@asynccontextmanager
async def taking(url: str) -> AsyncIterator[Callable[[], Awaitable[object]]]:
    store = ConversationsInRedis(url)
    yield lambda: store.take_entry("key")
    await store.close()


@asynccontextmanager
async def reading(url: str) -> AsyncIterator[Callable[[], Awaitable[object]]]:
    async with RegistrationsInRedis.connected(url) as store:
        yield store.read


def descriptors() -> set[str]:
    return {one.name for one in Path("/proc/self/fd").iterdir()}


async def test_turns_end_while_it_still_hangs_and_leave_nothing(hung: RedisServer) -> None:
    config = ProxyConfig.model_construct(conversation_store=hung.url(), conversation_budget_s=0.02)
    before, tasks = descriptors(), asyncio.all_tasks()
    for at_once in (1, 2, 20):
        async with Conversations.open(config) as conversations:
            turns = [Turn(str(key)) for key in range(at_once)]
            await asyncio.gather(*(conversations.begin_turn(turn, {DECODE}) for turn in turns))
            assert [turn.before for turn in turns] == [None] * at_once
            assert conversations.results == {"unknown": at_once}
    await until(lambda: descriptors() <= before)

    assert asyncio.all_tasks() == tasks


@pytest.mark.parametrize("asking", [taking, reading])
async def test_a_cancelled_connect_ends_at_every_step(
    hung: RedisServer,
    asking: Callable[[str], Asking],
) -> None:
    for steps in range(STEPS):
        async with asking(hung.url()) as ask:
            asked = asyncio.ensure_future(ask())
            for _ in range(steps):
                await asyncio.sleep(0)
            asked.cancel()
            await asyncio.wait({asked}, timeout=30)
            assert asked.cancelled()


async def test_a_turn_loses_only_its_prefix_if_the_store_loses_entries() -> None:
    class Deaf(ConversationsInMemory):
        async def take_entry(self, key: str) -> bytes | None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.sleep(30)
            raise AssertionError

    config = ProxyConfig.model_construct(conversation_budget_s=0.01)
    conversations = Conversations(Deaf(1), config)
    turn = Turn("key")
    await conversations.begin_turn(turn, {DECODE})

    assert turn.before is None
    assert conversations.results == {"unknown": 1}


async def test_by_tls_it_is_left_without_a_goodbye(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", tls=Certificates.make(tmp_path)) as server:
        assert server.tls is not None
        store = ConversationsInRedis(server.url(f"ssl_ca_certs={server.tls.ca}", "rediss"))
        await store.put("key", b"entry", 60)
        with server.paused():
            await store.close()
