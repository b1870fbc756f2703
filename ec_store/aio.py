"""The same calls for asyncio, each on a thread.

A store is synchronous, because vLLM calls it synchronously; here its calls leave the event loop to
others. A call that is cancelled goes on to its end on its thread, so that no reply is ever left in
a connection for the next caller to read.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from ec_store.base import Listed, Store, StoreStats
from ec_store.entry import Entry, EntryInfo
from ec_store.keys import EntryKey
from ec_store.opening import open_store
from ec_store.threads import DaemonPool

P = ParamSpec("P")
T = TypeVar("T")

THREADS = 8

CLOSE_S = 2.0
"""How long closing waits for a store that hangs."""


class AsyncStore:
    """A store whose calls are awaited; what they return and raise is `Store`'s.

    Attributes:
        counts: the store's.
    """

    def __init__(self, store: Store, pool: DaemonPool | None = None) -> None:
        """Wrap a store, which is closed with this one.

        Args:
            store: the store.
            pool: where its calls are made; closed with it.
        """
        self.counts = store.counts
        self._store = store
        self._pool = pool or DaemonPool(THREADS, "ec-store")

    @classmethod
    async def open(cls, url: str, *, create: bool = True, lazy: bool = False) -> Self:
        """Open a store by its URL, as `open_store` does."""
        pool = DaemonPool(THREADS, "ec-store")
        try:
            store = await on_thread(pool, lambda: open_store(url, create=create, lazy=lazy))
            return cls(store, pool)
        except BaseException:
            pool.close()
            raise

    async def check(self) -> None:
        """As `Store.check`."""
        await self._call(self._store.check)

    async def put(self, key: EntryKey, entry: Entry, *, replace: bool = False) -> bool:
        """As `Store.put`."""
        return await self._call(self._store.put, key, entry, replace=replace)

    async def get(self, key: EntryKey) -> Entry | None:
        """As `Store.get`."""
        return await self._call(self._store.get, key)

    async def lookup(self, keys: Sequence[EntryKey]) -> list[EntryInfo | None]:
        """As `Store.lookup`."""
        return await self._call(self._store.lookup, keys)

    async def lease(self, keys: Sequence[EntryKey], seconds: float) -> list[EntryInfo | None]:
        """As `Store.lease`."""
        return await self._call(self._store.lease, keys, seconds)

    async def claim(self, keys: Sequence[EntryKey], owner: str, seconds: float) -> list[bool]:
        """As `Store.claim`."""
        return await self._call(self._store.claim, keys, owner, seconds)

    async def release(self, keys: Sequence[EntryKey], owner: str) -> None:
        """As `Store.release`."""
        await self._call(self._store.release, keys, owner)

    async def claim_or_find(
        self, keys: Sequence[EntryKey], owner: str, seconds: float
    ) -> list[EntryInfo | bool]:
        """As `Store.claim_or_find`."""
        return await self._call(self._store.claim_or_find, keys, owner, seconds)

    def begin(self, visit: Callable[[Store], T]) -> asyncio.Future[T]:
        """Several calls in one go, on one thread: each hop there and back costs as much as one."""
        return on_thread(self._pool, lambda: visit(self._store))

    @property
    def in_memory(self) -> bool:
        """As `Store.in_memory`."""
        return self._store.in_memory

    def at_once(self, visit: Callable[[Store], T]) -> T:
        """Make calls on the event loop, which does nothing else until they have returned."""
        return visit(self._store)

    async def delete(self, keys: Sequence[EntryKey]) -> int:
        """As `Store.delete`."""
        return await self._call(self._store.delete, keys)

    async def purge(self, namespace: str) -> int:
        """As `Store.purge`."""
        return await self._call(self._store.purge, namespace)

    def ls(self) -> AsyncIterator[Listed]:
        """As `Store.ls`."""
        return self._iterate(self._store.ls)

    def verify(self, *, fix: bool = False) -> AsyncIterator[Listed]:
        """As `Store.verify`."""
        return self._iterate(lambda: self._store.verify(fix=fix))

    async def evict(self) -> int:
        """As `Store.evict`."""
        return await self._call(self._store.evict)

    async def sweep(self, every_s: float = 0.0) -> int:
        """As `Store.sweep`."""
        return await self._call(self._store.sweep, every_s)

    async def stats(self) -> StoreStats:
        """As `Store.stats`."""
        return await self._call(self._store.stats)

    async def register_namespace(self, model: str, namespace: str) -> None:
        """As `Store.register_namespace`."""
        await self._call(self._store.register_namespace, model, namespace)

    async def namespaces(self) -> Mapping[str, str]:
        """As `Store.namespaces`."""
        return await self._call(self._store.namespaces)

    async def close(self) -> None:
        """As `Store.close`. A store that hangs is left to itself after a while."""
        # On a thread of its own: calls that hang may have all those of the pool.
        closing = DaemonPool(1, "ec-store-close")
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await on_thread(closing, self._store.close)
        closing.close()
        self._pool.close()

    async def __aenter__(self) -> Self:
        """The store itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        await self.close()

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await on_thread(self._pool, lambda: function(*args, **kwargs))

    async def _iterate(self, start: Callable[[], Iterator[T]]) -> AsyncIterator[T]:
        rows = await self._call(start)
        while True:
            row = await self._call(next, rows, None)
            if row is None:
                return
            yield row


def on_thread(pool: DaemonPool, call: Callable[[], T]) -> asyncio.Future[T]:
    """Have a call made on a thread; its future is cancelled where the pool is closed.

    `asyncio.wrap_future` does the same with the locks of a future for threads, at twice the cost.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(settle: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits
            loop.call_soon_threadsafe(lambda: future.done() or settle())

    def job() -> None:
        if future.cancelled():
            return
        try:
            result = call()
        except BaseException as failure:  # noqa: BLE001 - whoever waits for it is told
            tell(partial(future.set_exception, failure))
        else:
            tell(partial(future.set_result, result))

    pool.begin(job, lambda: tell(future.cancel))
    return future
