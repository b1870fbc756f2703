"""Asyncio interface of a store: its calls, and an event loop beside them."""

import asyncio
import shutil
import threading
from pathlib import Path

import pytest

from ec_store import EntryKey, StoreUnavailable, open_store
from ec_store.aio import CLOSE_S, AsyncStore
from ec_store.concurrency import DaemonPool
from ec_store.disk.config import DiskConfig
from ec_store.disk.store import SharedDiskStore
from ec_store.errors import StoreMissing
from ec_store.opening import open_async_store
from tests.ec_store.entries import entry

KEY = EntryKey("ns", "k")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store?max_bytes=1MiB"


async def test_async_store_has_the_calls_of_the_store(url: str) -> None:
    async with await open_async_store(url) as store:
        assert await store.put(KEY, entry())
        assert not await store.put(KEY, entry())
        assert await store.get(KEY) == entry()
        [info], [leased] = await store.lookup([KEY]), await store.lease([KEY], 10)
        assert info == leased
        assert info is not None
        assert info.shape == (3, 4)
        assert await store.claim([KEY], "a", 10) == [True]
        assert await store.claim([KEY], "b", 10) == [False]
        await store.release([KEY], "a")
        assert await store.claim([KEY], "b", 10) == [True]
        await store.register_namespace("m", "ns")
        assert await store.namespaces() == {"m": "ns"}
        assert (await store.stats()).puts == 1
        assert await store.delete([KEY]) == 1


async def test_a_store_is_closed_while_every_thread_hangs(url: str) -> None:
    store, pool, go = open_store(url), DaemonPool(1, "test"), threading.Event()
    hanging = pool.submit(go.wait)
    try:
        await asyncio.wait_for(AsyncStore(store, pool).close(), CLOSE_S / 2)
        with pytest.raises(StoreUnavailable, match="closed"):
            store.get(KEY)
    finally:
        go.set()
        hanging.result(60)


async def test_a_missing_store_without_create_is_an_error(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with pytest.raises(StoreMissing, match=f"there is no store in {root}"):
        await open_async_store(root.as_uri(), create=False)
    assert not root.exists()

    with open_store(root.as_uri()):
        pass
    config = DiskConfig.from_url(root.as_uri())
    async with AsyncStore(SharedDiskStore(config, create=False, look_every_s=0)) as store:
        shutil.rmtree(root)
        with pytest.raises(StoreMissing, match=f"there is no store in {root}"):
            await store.claim([KEY], "a", 10)
        assert await store.lookup([KEY]) == [None]
        assert not root.exists()

        with open_store(root.as_uri()) as made:
            made.put(KEY, entry())
        assert await store.get(KEY) == entry()


async def test_calls_leave_the_event_loop_free(url: str) -> None:
    async with await open_async_store(url) as store:
        large = entry(shape=(1000, 200))
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(tick())
        for number in range(3):
            await store.put(EntryKey("ns", str(number)), large)
        task.cancel()

        assert ticks > 3
