"""The store's contract, with all calls that `AsyncArenaStore` has made by it on an event loop."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from ec_store import EntryInfo, EntryKey
from ec_store.arena.aio_store import AsyncArenaStore
from ec_store.arena.store import ArenaStore
from ec_store.arena.url import ArenaOptions
from ec_store.testing.stores import Opened
from tests.ec_store.arena.test_contract import TestArena as ArenaContract

T = TypeVar("T")


class OnLoop(ArenaStore):
    """Store for a thread that waits; only payloads and maintenance take the synchronous way."""

    def __init__(self, path: Path) -> None:
        options = ArenaOptions(str(path), timeout_s=10, verify=1)
        super().__init__(options)
        self.loop = uvloop.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.aio = AsyncArenaStore.from_options(options)

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self.loop).result(60)

    def lookup(self, keys: Sequence[EntryKey]) -> list[EntryInfo | None]:
        return self.run(self.aio.lookup(keys))

    def lease(self, keys: Sequence[EntryKey], seconds: float) -> list[EntryInfo | None]:
        return self.run(self.aio.lease(keys, seconds))

    def claim(
        self, keys: Sequence[EntryKey], owner: str, seconds: float, **_: object
    ) -> list[bool]:
        return self.run(self.aio.claim(keys, owner, seconds))

    def claim_or_find(
        self, keys: Sequence[EntryKey], owner: str, seconds: float
    ) -> list[EntryInfo | bool]:
        return self.run(self.aio.claim_or_find(keys, owner, seconds))

    def release(self, keys: Sequence[EntryKey], owner: str) -> None:
        self.run(self.aio.release(keys, owner))

    def delete(self, keys: Sequence[EntryKey]) -> int:
        return self.run(self.aio.delete(keys))

    def namespaces(self) -> Mapping[str, str]:
        return self.run(self.aio.namespaces())

    def close(self) -> None:
        if not self.loop.is_closed():
            self.run(self.aio.close())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()
        super().close()


class TestAsyncArena(ArenaContract):
    @pytest.fixture
    def opened(self, path: Path) -> Iterator[Opened]:
        stores: list[OnLoop] = []

        def open_store() -> ArenaStore:
            stores.append(OnLoop(path))
            return stores[-1]

        yield open_store
        for store in stores:
            store.close()
