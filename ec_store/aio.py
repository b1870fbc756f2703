"""Asyncio interface to a store: each call runs on a thread.

A store is synchronous, because vLLM calls it synchronously. Threads keep its calls off the event
loop. A cancelled call runs to its end on its thread, so that no unread reply stays in a connection
for the next caller.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import ParamSpec, Self, TypeVar

from ec_store.base import Store, StoreStats
from ec_store.concurrency import DaemonPool
from ec_store.entry import Entry, EntryInfo
from ec_store.errors import StoreUnavailable
from ec_store.keys import EntryKey

P = ParamSpec("P")
T = TypeVar("T")

THREADS = 8

CLOSE_S = 2.0
"""Longest time in seconds that `AsyncStore.close` waits for a store that hangs."""


class AsyncStore:
    """Asyncio wrapper of the calls of a store that a proxy makes, with their results and errors."""

    def __init__(self, store: Store, pool: DaemonPool | None = None) -> None:
        """Wrap a store. `close` closes it, and the pool that runs its calls."""
        self.counts = store.counts
        self._store = store
        self._pool = pool or DaemonPool(THREADS, "ec-store")

    async def check(self) -> None:
        await self._call(self._store.check)

    async def put(self, key: EntryKey, entry: Entry, *, replace: bool = False) -> bool:
        return await self._call(self._store.put, key, entry, replace=replace)

    async def get(self, key: EntryKey) -> Entry | None:
        return await self._call(self._store.get, key)

    async def lookup(self, keys: Sequence[EntryKey]) -> list[EntryInfo | None]:
        return await self._call(self._store.lookup, keys)

    async def lease(self, keys: Sequence[EntryKey], seconds: float) -> list[EntryInfo | None]:
        return await self._call(self._store.lease, keys, seconds)

    async def claim(self, keys: Sequence[EntryKey], owner: str, seconds: float) -> list[bool]:
        return await self._call(self._store.claim, keys, owner, seconds)

    async def release(self, keys: Sequence[EntryKey], owner: str) -> None:
        await self._call(self._store.release, keys, owner)

    async def claim_or_find(
        self, keys: Sequence[EntryKey], owner: str, seconds: float
    ) -> list[EntryInfo | bool]:
        return await self._call(self._store.claim_or_find, keys, owner, seconds)

    async def delete(self, keys: Sequence[EntryKey]) -> int:
        return await self._call(self._store.delete, keys)

    async def sweep(self, every_s: float = 0.0) -> int:
        return await self._call(self._store.sweep, every_s)

    async def stats(self) -> StoreStats:
        return await self._call(self._store.stats)

    async def register_namespace(self, model: str, namespace: str) -> None:
        await self._call(self._store.register_namespace, model, namespace)

    async def namespaces(self) -> Mapping[str, str]:
        return await self._call(self._store.namespaces)

    async def close(self) -> None:
        """Close the store, or abandon it if it hangs for more than `CLOSE_S` seconds."""
        # A separate thread: calls that hang may occupy all threads of the pool.
        closing = DaemonPool(1, "ec-store-close")
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await on_thread(closing, self._store.close)
        closing.close()
        self._pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await on_thread(self._pool, lambda: function(*args, **kwargs))


def on_thread(pool: DaemonPool, call: Callable[[], T]) -> asyncio.Future[T]:
    """Run a call on a thread of the pool and return its future.

    Closing the pool cancels the futures of calls that have not started. If no thread can be
    started, the future has the error StoreUnavailable. `asyncio.wrap_future` does the same with the
    locks of a thread-safe future, at twice the cost.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle_future(settle: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nothing waits for the result
            loop.call_soon_threadsafe(lambda: future.done() or settle())

    def job() -> None:
        if future.cancelled():
            return
        try:
            result = call()
        except BaseException as failure:  # noqa: BLE001 - the future raises it
            settle_future(partial(future.set_exception, failure))
        else:
            settle_future(partial(future.set_result, result))

    def dropped() -> None:
        if pool.closed:
            settle_future(future.cancel)
        else:
            settle_future(
                partial(future.set_exception, StoreUnavailable("no thread can be started"))
            )

    pool.queue_job(job, dropped)
    return future
