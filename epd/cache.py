"""The proxy's side of the encoder-cache store: only ever help.

The store is asked within a budget. While it does not answer, or cannot be opened, it is gone
around: everything counts as a miss, and requests are served as if there were none.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Self, TypeVar

import structlog

from ec_store import Entry, EntryInfo, EntryKey, StoreUnavailable
from ec_store.aio import AsyncStore
from ec_store.breaker import Breaker

REFRESH_S = 5.0
"""How often the namespaces are read, and how often a store is tried that could not be opened."""

OPEN_WITHIN_S = 2.0
"""How long a start waits for the store."""

MAX_LEARNED = 1024
"""How many models' namespaces are remembered that the store does not name."""

CLAIM_S = 10.0
"""How long a claim outlives its holder."""

CLAIM_TIMEOUT_S = 1.0
"""A claim's budget. It may cost more than a look-up's, since an encode follows it anyway."""

WRITTEN_WITHIN_S = 5.0
"""How long a claim is kept for an encode instance that has answered and still writes."""

NOTHING = memoryview(b"")
"""The tensor of an alias, which is an entry that has only metadata."""

POLL_S = (0.005, 0.01, 0.02, 0.05)
"""Waits between two looks for an entry that somebody makes; the last one goes on."""

T = TypeVar("T")

logger = structlog.get_logger("epd")


class EncoderCache:
    """A store, asked about the entries of served models. Belongs to one event loop."""

    def __init__(self, url: str, *, budget_s: float, lease_s: float) -> None:
        """Ask nothing yet.

        Args:
            url: of the store.
            budget_s: for a look-up; after it everything is a miss.
            lease_s: how long what was found is safe from eviction.
        """
        self._url = url
        self._budget_s = budget_s
        self._lease_s = lease_s
        self._owner = secrets.token_hex(16)
        self._store: AsyncStore | None = None
        self._breaker = Breaker("the encoder cache")
        self._namespaces: Mapping[str, str] = {}
        self._learned: dict[str, str] = {}
        self._refresh_now = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str, *, budget_s: float, lease_s: float) -> AsyncIterator[Self]:
        """A cache that is open, or opens as soon as its store can be, until the context is left."""
        cache = cls(url, budget_s=budget_s, lease_s=lease_s)
        ready = asyncio.Event()
        cache.later(cache._keep_fresh(ready))
        with suppress(TimeoutError):
            await asyncio.wait_for(ready.wait(), OPEN_WITHIN_S)
        try:
            yield cache
        finally:
            for task in cache._tasks:
                task.cancel()
            await asyncio.gather(*cache._tasks, return_exceptions=True)
            if cache._store is not None:
                await cache._store.close()

    async def find(
        self, model: str | None, identifiers: Sequence[str]
    ) -> Mapping[str, EntryInfo] | None:
        """What the store has of these, by identifier, leased; in one round trip.

        Returns:
            None where it has no answer: it is better not asked anything else for this request.
        """
        namespace = self._namespace(model)
        if namespace is None or not identifiers:
            return {}
        keys = [EntryKey(namespace, identifier) for identifier in identifiers]
        infos = await self._ask(lambda store: store.lease(keys, self._lease_s), self._budget_s)
        if infos is None:
            return None
        return {info.key.identifier: info for info in infos if info is not None}

    async def remember(self, model: str | None, alias: str, modality: str, uuid: str) -> None:
        """Keep for which item an alias stands, for as long as the store keeps what is used."""
        key = self._alias(model, alias)
        if key is None:
            return
        entry = Entry(NOTHING, "F32", (0,), modality, {"uuid": uuid})
        known = await self._ask(lambda store: store.lookup([key]), CLAIM_TIMEOUT_S)
        if known and known[0] is not None:
            if known[0].metadata.get("uuid") == uuid:
                return
            await self._ask(lambda store: store.delete([key]), CLAIM_TIMEOUT_S)
        await self._ask(lambda store: store.put(key, entry), CLAIM_TIMEOUT_S)

    async def recall(self, model: str | None, aliases: Sequence[str]) -> Mapping[str, str]:
        """The uuids of items, by alias; those that are not known are missing."""
        keys = [key for alias in aliases if (key := self._alias(model, alias)) is not None]
        infos = await self._ask(lambda store: store.lease(keys, self._lease_s), CLAIM_TIMEOUT_S)
        return {
            info.key.identifier: str(info.metadata.get("uuid"))
            for info in infos or ()
            if info is not None
        }

    async def forget(
        self, model: str | None, aliases: Sequence[str], identifiers: Sequence[str]
    ) -> int:
        """Delete aliases and entries; how many there were of both.

        Raises:
            StoreUnavailable: the store cannot be asked to.
        """
        keys = [key for alias in aliases if (key := self._alias(model, alias)) is not None]
        namespace = self._namespace(model)
        if namespace is not None:
            keys += [EntryKey(namespace, identifier) for identifier in identifiers]
        deleted = await self._ask(lambda store: store.delete(keys), CLAIM_TIMEOUT_S)
        if deleted is None:
            raise StoreUnavailable("the store gives no answer")
        return deleted

    def _alias(self, model: str | None, alias: str) -> EntryKey | None:
        namespace = self._namespace(model)
        return None if namespace is None else EntryKey(f"{namespace}#aliases", alias)

    def learn(self, model: str | None, namespace: str) -> None:
        """Take an encode instance's word for the namespace of a model.

        The store's own word counts more, and is asked for where the two differ.
        """
        if model is None:
            return
        if self._namespaces.get(model, namespace) != namespace:
            self._refresh_now.set()
        self._learned[model] = namespace
        while len(self._learned) > MAX_LEARNED:
            del self._learned[next(iter(self._learned))]

    @asynccontextmanager
    async def turn(
        self, model: str | None, identifier: str, wait_s: float
    ) -> AsyncIterator[EntryInfo | None]:
        """Wait until nobody else encodes an item; what somebody has made of it, or None.

        While the context is open, other proxies on the same store wait in turn. After it they go on
        waiting until the entry is there, for an encode instance answers before it has written.

        Args:
            model: whose item it is.
            identifier: its key.
            wait_s: how long to wait at most. After it, or where the store is away, the item is
                encoded whoever else does.
        """
        namespace = self._namespace(model)
        if namespace is None:
            yield None
            return
        key = EntryKey(namespace, identifier)
        claimed, found = await self._wait_for_turn(key, wait_s)
        if not claimed:
            yield found
            return
        renewing = asyncio.create_task(self._renew(key))
        made = False
        try:
            yield found
            made = found is None
        finally:
            renewing.cancel()
            self.later(self._release(key, written_within_s=WRITTEN_WITHIN_S if made else 0))

    async def _wait_for_turn(self, key: EntryKey, wait_s: float) -> tuple[bool, EntryInfo | None]:
        """Whether the key is claimed, and its entry."""
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + wait_s
        waits = iter(POLL_S)
        while True:
            claims = await self._ask(
                lambda store: store.claim([key], self._owner, CLAIM_S), CLAIM_TIMEOUT_S
            )
            # Looked for after the claim: it may have been written between the first look and this.
            infos = await self._ask(
                lambda store: store.lease([key], self._lease_s), CLAIM_TIMEOUT_S
            )
            found = infos[0] if infos else None
            claimed = claims is not None and claims[0]
            if claimed or found or claims is None or clock() > deadline_s:
                return claimed, found
            await asyncio.sleep(next(waits, POLL_S[-1]))

    async def _renew(self, key: EntryKey) -> None:
        while True:
            await asyncio.sleep(CLAIM_S / 3)
            await self._ask(lambda store: store.claim([key], self._owner, CLAIM_S), CLAIM_TIMEOUT_S)

    async def _release(self, key: EntryKey, *, written_within_s: float) -> None:
        """Give a claim back, once the entry is there or will not come any more."""
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + written_within_s
        waits = iter(POLL_S)
        while clock() < deadline_s:
            infos = await self._ask(lambda store: store.lookup([key]), CLAIM_TIMEOUT_S)
            if infos is None or infos[0] is not None:
                break
            await asyncio.sleep(next(waits, POLL_S[-1]))
        await self._ask(lambda store: store.release([key], self._owner), CLAIM_TIMEOUT_S)

    def _namespace(self, model: str | None) -> str | None:
        if model is not None:
            return self._namespaces.get(model) or self._learned.get(model)
        # vLLM serves a request without a model; which one is clear where there is one.
        known = set(self._namespaces.values())
        return known.pop() if len(known) == 1 else None

    async def _ask(self, call: Callable[[AsyncStore], Awaitable[T]], timeout_s: float) -> T | None:
        """The store's answer; None where it has none to give."""
        if self._store is None or self._breaker.open:
            return None
        try:
            async with asyncio.timeout(timeout_s):
                answer = await call(self._store)
        except TimeoutError:
            self._breaker.failed(f"no answer within {timeout_s:g} s")
            return None
        except StoreUnavailable as error:
            self._breaker.failed(error)
            return None
        self._breaker.succeeded()
        return answer

    async def _keep_fresh(self, ready: asyncio.Event) -> None:
        """Open the store, and read the namespaces again and again."""
        while True:
            try:
                if self._store is None:
                    self._store = await AsyncStore.open(self._url)
                self._namespaces = await self._store.namespaces()
                ready.set()
            except StoreUnavailable as error:
                logger.warning("the encoder cache is away", reason=str(error))
            self._refresh_now.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._refresh_now.wait(), REFRESH_S)

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Have something done while nobody waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
