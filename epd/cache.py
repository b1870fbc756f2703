"""The proxy's side of the encoder-cache store: only ever help.

The store is asked within a budget. While it does not answer, or cannot be opened, it is gone
around: everything counts as a miss, and requests are served as if there were none.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import structlog

from ec_store import EntryInfo, EntryKey, StoreError
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

PATIENT_S = 1.0
"""The budget of what a request cannot do without, or what costs little beside an encode."""

WRITTEN_WITHIN_S = 1.0
"""How long a claim is kept for an encode instance that has answered and still writes."""

POLL_S = (0.005, 0.01, 0.02, 0.05)
"""Waits between two looks for an entry that somebody makes; the last one goes on."""

T = TypeVar("T")


@dataclass(slots=True)
class Turn:
    """A place in the queue of those who want an item encoded.

    Attributes:
        found: the entry, where somebody else has made it.
        made: the identifier under which an encode instance now writes it; to be set.
    """

    found: EntryInfo | None = None
    made: str | None = None


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
        self._reading = Breaker("reading from the encoder cache")
        self._writing = Breaker("writing to the encoder cache")
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
        self, model: str | None, identifiers: Sequence[str], *, patient: bool = False
    ) -> Mapping[str, EntryInfo] | None:
        """What the store has of these, by identifier; in one round trip. It is leased soon after.

        Args:
            model: whose items they are.
            identifiers: their keys.
            patient: whether the request cannot be served without an answer.

        Returns:
            None where it has no answer: it is better not asked anything else for this request.
        """
        namespace = self.namespace(model)
        if namespace is None or not identifiers:
            return {}
        keys = [EntryKey(namespace, identifier) for identifier in identifiers]
        budget_s = PATIENT_S if patient else self._budget_s
        infos = await self.read(lambda store: store.lookup(keys), budget_s)
        if infos is None:
            return None
        found = {info.key.identifier: info for info in infos if info is not None}
        if found:
            self.later(self.lease([info.key for info in found.values()]))
        return found

    async def lease(self, keys: Sequence[EntryKey]) -> None:
        """Keep what is there from being evicted for a while."""
        await self.write(lambda store: store.lease(keys, self._lease_s), PATIENT_S)

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
    async def turn(self, model: str | None, identifier: str, wait_s: float) -> AsyncIterator[Turn]:
        """Wait until nobody else encodes an item, or somebody has.

        While the context is open, other proxies on the same store wait in turn. After it they go on
        waiting until the entry is there, for an encode instance answers before it has written.

        Args:
            model: whose item it is.
            identifier: its key.
            wait_s: how long to wait at most. After it, or where the store is away, the item is
                encoded whoever else does.
        """
        namespace = self.namespace(model)
        if namespace is None:
            yield Turn()
            return
        key = EntryKey(namespace, identifier)
        claimed, found = await self._wait_for_turn(key, wait_s)
        turn = Turn(found)
        if not claimed:
            yield turn
            return
        renewing = asyncio.create_task(self._renew(key))
        try:
            yield turn
        finally:
            renewing.cancel()
            self.later(self._release(key, turn.made))

    async def _wait_for_turn(self, key: EntryKey, wait_s: float) -> tuple[bool, EntryInfo | None]:
        """Whether the key is claimed, and its entry."""
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + wait_s
        waits = iter(POLL_S)
        while True:
            claimed = await self._claim(key)
            # Looked for after the claim: it may have been written between the first look and this.
            infos = await self.read(lambda store: store.lookup([key]), PATIENT_S)
            found = infos[0] if infos else None
            if claimed is not False or found or clock() > deadline_s:
                return bool(claimed), found
            await asyncio.sleep(next(waits, POLL_S[-1]))

    async def _claim(self, key: EntryKey) -> bool | None:
        """Whether the key is claimed now; None where the store gives no answer.

        A claim that is taken after all, when nobody waits for it any more, is given back.
        """
        asking = asyncio.create_task(
            self.write(lambda store: store.claim([key], self._owner, CLAIM_S), CLAIM_S)
        )
        try:
            async with asyncio.timeout(PATIENT_S):
                claims = await asyncio.shield(asking)
        except BaseException as left:
            self.later(self._give_back(key, asking))
            if isinstance(left, TimeoutError):
                return None
            raise
        return None if claims is None else claims[0]

    async def _give_back(self, key: EntryKey, asking: "asyncio.Task[list[bool] | None]") -> None:
        await asyncio.wait([asking])
        await self.write(lambda store: store.release([key], self._owner), PATIENT_S)

    async def _renew(self, key: EntryKey) -> None:
        while True:
            await asyncio.sleep(CLAIM_S / 3)
            # Not `_claim`, which gives back what nobody waits for: this claim is in use.
            await self.write(lambda store: store.claim([key], self._owner, CLAIM_S), PATIENT_S)

    async def _release(self, key: EntryKey, made: str | None) -> None:
        """Give a claim back, once the entry is there or will not come any more."""
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + WRITTEN_WITHIN_S
        waits = iter(POLL_S)
        written = None if made is None else EntryKey(key.namespace, made)
        while written is not None and clock() < deadline_s:
            infos = await self.read(lambda store: store.lookup([written]), PATIENT_S)
            if infos is None or infos[0] is not None:
                break
            await asyncio.sleep(next(waits, POLL_S[-1]))
        await self.write(lambda store: store.release([key], self._owner), PATIENT_S)

    def namespace(self, model: str | None) -> str | None:
        """Under which the store keeps a served model's entries; None where nobody has said."""
        if model is not None:
            return self._namespaces.get(model) or self._learned.get(model)
        # vLLM serves a request without a model; which one is clear where there is one.
        known = set(self._namespaces.values())
        return known.pop() if len(known) == 1 else None

    async def read(self, call: Callable[[AsyncStore], Awaitable[T]], timeout_s: float) -> T | None:
        """The store's answer to a question; None where it has none to give."""
        return await self._ask(call, timeout_s, self._reading)

    async def write(self, call: Callable[[AsyncStore], Awaitable[T]], timeout_s: float) -> T | None:
        """The same for a change: a store may answer the one and not the other."""
        return await self._ask(call, timeout_s, self._writing)

    async def _ask(
        self, call: Callable[[AsyncStore], Awaitable[T]], timeout_s: float, breaker: Breaker
    ) -> T | None:
        """The store's answer; None where it has none to give."""
        if self._store is None or breaker.open:
            return None
        try:
            async with asyncio.timeout(timeout_s):
                answer = await call(self._store)
        except TimeoutError:
            breaker.failed(f"no answer within {timeout_s:g} s")
            return None
        except (StoreError, ValueError) as error:
            breaker.failed(error)
            return None
        breaker.succeeded()
        return answer

    async def _keep_fresh(self, ready: asyncio.Event) -> None:
        """Open the store, and read the namespaces again and again."""
        while True:
            try:
                if self._store is None:
                    self._store = await AsyncStore.open(self._url)
                async with asyncio.timeout(REFRESH_S):
                    self._namespaces = await self._store.namespaces()
                ready.set()
            except (StoreError, ValueError, OSError) as error:  # TimeoutError is an OSError
                logger.warning("the encoder cache is away", reason=str(error) or "no answer")
            self._refresh_now.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._refresh_now.wait(), REFRESH_S)

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Have something done while nobody waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
