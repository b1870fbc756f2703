"""What this proxy has encoded, so that others on its store wait for it in place of doing it too.

A claim is asked for with the look-up that finds nothing, in the same visit to the store. It is a
hint: whatever goes wrong costs a second encode.
"""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ec_store import EntryInfo, EntryKey
from epd.cache.encoder_cache import EncoderCache
from epd.cache.look import Look

CLAIM_S = 10.0
"""How long a claim outlives its holder."""

WRITTEN_WITHIN_S = 1.0
"""How long a claim is kept for an encode instance that has answered and still writes. Who waits
looks for the entry, and needs nothing to be given back once it is there."""

POLL_S = (0.005, 0.01, 0.02, 0.05)
"""Waits between two looks for an entry that somebody makes; the last one goes on."""

TENDS = 20
"""How often within `CLAIM_S` claims are renewed that need it, and given back, all in one go."""


@dataclass(slots=True)
class _Held:
    """A claim of this proxy.

    Attributes:
        since_s: when it was taken or renewed, on the event loop's clock.
        holders: how many need it.
        until_s: how long it is kept when none does.
    """

    since_s: float
    holders: int = 0
    until_s: float = 0.0


class Claims:
    """Claims are taken, renewed while they are held, and given back. Belongs to one event loop.

    Attributes:
        first: who looks for a key that nobody else here looked for before.
    """

    def __init__(self, cache: EncoderCache) -> None:
        self._cache = cache
        self._owner = secrets.token_hex(16)
        self._held: dict[EntryKey, _Held] = {}
        self.first: dict[EntryKey, Look] = {}
        self._tending = False

    def look(
        self,
        model: str | None,
        identifiers: Sequence[str],
        *,
        patient: bool = False,
        namespace: str | None = None,
    ) -> "Looking":
        """A look for some items, in which what the store has not is claimed.

        Args:
            model: whose items they are.
            identifiers: their keys.
            patient: whether the request cannot be served without an answer. It claims nothing.
            namespace: the consumer's; None: the model's.
        """
        keys = self._cache.keys(model, identifiers, namespace)
        # What others here have claimed or ask for is for its turn to find out.
        first = not patient and not any(key in self._held or key in self.first for key in keys)
        look = self._new(keys) if first else Look(keys)
        return Looking(self, look, first=first, patient=patient)

    def turn(
        self, model: str | None, identifier: str, wait_s: float, namespace: str | None = None
    ) -> "Turn":
        """A place in the queue of those who want an item encoded.

        Args:
            model: whose item it is.
            identifier: its key.
            wait_s: how long to wait at most. After it, or where the store is away, the item is
                encoded whoever else does.
            namespace: the consumer's; None: the model's.
        """
        return Turn(self, self._cache.keys(model, [identifier], namespace), wait_s)

    async def visit(self, look: Look, held: list[EntryKey], *, patient: bool) -> bool:
        """Have a look made, and hold what was claimed; whether the store has an answer."""
        try:
            return await self._cache.visit(look, patient=patient)
        finally:
            held += self.hold(look.claimed)

    async def wait_for_turn(
        self, key: EntryKey, wait_s: float, held: list[EntryKey]
    ) -> EntryInfo | None:
        """The entry, where it is there; the key is held where it was claimed."""
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + wait_s
        waits = iter(POLL_S)
        while True:
            look = self._new([key])
            await self.visit(look, held, patient=True)
            found = (look.found or {}).get(key)
            if found or held or not look.settled or clock() > deadline_s:
                return found
            await asyncio.sleep(next(waits, POLL_S[-1]))

    def _new(self, keys: Sequence[EntryKey]) -> Look:
        return Look(keys, self._owner, CLAIM_S)

    def hold(self, keys: Sequence[EntryKey]) -> Sequence[EntryKey]:
        """Need claims that were taken, until they are let go."""
        now_s = asyncio.get_running_loop().time()
        for key in keys:
            self._held.setdefault(key, _Held(now_s)).holders += 1
        if keys and not self._tending:
            self._tending = True
            self._cache.later(self._tend())
        return keys

    def let_go(self, keys: Sequence[EntryKey], after_s: float = 0.0) -> None:
        """Need claims no longer, which are given back then, or `after_s`."""
        now_s = asyncio.get_running_loop().time()
        over = []
        for key in keys:
            held = self._held[key]
            held.holders -= 1
            held.until_s = max(held.until_s, now_s + after_s)
            if not held.holders and held.until_s <= now_s:
                del self._held[key]
                over.append(key)
        if over:
            self._cache.later(self._cache.release(over, self._owner))

    async def _tend(self) -> None:
        """Renew claims and give them back, for as long as there are any."""
        clock = asyncio.get_running_loop().time
        while self._held:
            await asyncio.sleep(CLAIM_S / TENDS)
            now_s = clock()
            over = [
                key
                for key, held in self._held.items()
                if not held.holders and held.until_s <= now_s
            ]
            for key in over:
                del self._held[key]
            await self._cache.release(over, self._owner)
            await self._renew(
                [key for key, held in self._held.items() if now_s - held.since_s > CLAIM_S / 3]
            )
        self._tending = False

    async def _renew(self, keys: Sequence[EntryKey]) -> None:
        now_s = asyncio.get_running_loop().time()
        for key in keys:
            self._held[key].since_s = now_s
        if keys:
            await self._cache.write("renew", lambda store: store.claim(keys, self._owner, CLAIM_S))


class Looking:
    """A look at the store: a context, within which what it claims is held.

    Whose turn it is within the context, need not wait.
    """

    __slots__ = ("_claims", "_first", "_held", "_look", "_patient")

    def __init__(self, claims: Claims, look: Look, *, first: bool, patient: bool) -> None:
        """To be made by `Claims.look`."""
        self._claims = claims
        self._look = look
        self._first = first
        self._patient = patient
        self._held: list[EntryKey] = []

    def __enter__(self) -> Self:
        """Let others here know."""
        if self._first:
            self._claims.first.update(dict.fromkeys(self._look.keys, self._look))
        return self

    async def answer(self) -> Look | None:
        """What the store has; None where it has no answer."""
        answered = await self._claims.visit(self._look, self._held, patient=self._patient)
        return self._look if answered else None

    def __exit__(self, *_: object) -> None:
        """Let go of what was claimed."""
        first = self._claims.first
        for key in self._look.keys:
            if first.get(key) is self._look:
                del first[key]
        self._claims.let_go(self._held)


class Turn:
    """A place in the queue of those who want an item encoded: a context.

    While it is open, other proxies on the same store wait in turn. After it they go on waiting
    until the entry is there, for an encode instance answers before it has written.

    Attributes:
        made: whether an encode instance now writes the entry; to be set.
    """

    __slots__ = ("_claims", "_held", "_keys", "_wait_s", "made")

    def __init__(self, claims: Claims, keys: Sequence[EntryKey], wait_s: float) -> None:
        """To be made by `Claims.turn`."""
        self._claims = claims
        self._keys = keys
        self._wait_s = wait_s
        self._held: list[EntryKey] = []
        self.made = False

    def __enter__(self) -> Self:
        """Nothing is held yet."""
        return self

    @property
    def first(self) -> bool:
        """Whether it has come already: nobody else is known to want the item."""
        looks = self._claims.first
        return all(key in looks and key in looks[key].claimed for key in self._keys)

    async def come(self) -> EntryInfo | None:
        """Wait until nobody else encodes the item, or somebody has: the entry then."""
        for key in self._keys:
            # Whoever comes first goes by the look that claimed it, and the next one looks anew.
            look = self._claims.first.pop(key, None)
            if look is None or key not in look.claimed:
                return await self._claims.wait_for_turn(key, self._wait_s, self._held)
            self._held += self._claims.hold([key])
        return None

    def __exit__(self, *_: object) -> None:
        """Let go of what was claimed, at once where nothing was made."""
        self._claims.let_go(self._held, WRITTEN_WITHIN_S if self.made else 0.0)
