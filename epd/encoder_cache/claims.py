"""Claims of this proxy, so that other proxies on its store wait for its encode.

A claim is part of the lookup that misses, in the same visit to the store. It is a hint: any failure
costs at most a second encode.
"""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from ec_store.entry import EntryInfo
from ec_store.keys import EntryKey
from epd.encoder_cache.client import EncoderCache
from epd.encoder_cache.lookup import Lookup

CLAIM_S = 10.0
"""Lifetime of a claim after its last renewal, in seconds."""

WRITTEN_WITHIN_S = 1.0
"""Time for which a claim is kept after the encode instance has answered, because the instance is
still writing. A waiter polls for the entry, so the claim need not be released earlier."""

POLL_S = (0.005, 0.01, 0.02, 0.05)
"""Delays between two lookups of an entry that another proxy encodes; the last one repeats."""

TENDS = 20
"""Number of maintenance rounds within `CLAIM_S`. Each renews and releases claims in one call."""


@dataclass(slots=True)
class _Held:
    """A claim of this proxy.

    Attributes:
        since_s: time of the last claim or renewal, on the event loop's clock.
        until_s: time until which it is kept without a holder.
    """

    since_s: float
    holders: int = 0
    until_s: float = 0.0


class Claims:
    """Takes claims, renews them while they are held, and releases them. Belongs to one event loop.

    Attributes:
        cache: client of the store with the claims.
        pending_lookups: by key, the first lookup of this process that may claim it.
    """

    def __init__(self, cache: EncoderCache) -> None:
        self.cache = cache
        self._owner = secrets.token_hex(16)
        self._held: dict[EntryKey, _Held] = {}
        self.pending_lookups: dict[EntryKey, Lookup] = {}
        self._tending = False

    def start_lookup(
        self,
        model: str | None,
        identifiers: Sequence[str],
        *,
        patient: bool = False,
        namespace: str | None = None,
    ) -> "LookupContext":
        """Return a lookup of some items that claims the missing ones.

        A `patient` lookup is for a request that cannot do without an answer. It claims nothing.
        """
        keys = self.cache.keys(model, identifiers, namespace)
        # Keys that this process has claimed or is looking up are resolved by `queue_claim`.
        known = any(key in self._held or key in self.pending_lookups for key in keys)
        claiming = not patient and not known
        lookup = self._new(keys) if claiming else Lookup(keys)
        return LookupContext(self, lookup, claiming, patient)

    def queue_claim(
        self, model: str | None, identifier: str, wait_s: float, namespace: str | None = None
    ) -> "ClaimWait":
        """Return a place in the queue of the requests that need an item encoded.

        After `wait_s`, or without the store, the item is encoded even if another proxy encodes it.
        """
        return ClaimWait(self, self.cache.keys(model, [identifier], namespace), wait_s)

    def is_used(self, key: EntryKey, lookup: Lookup) -> bool:
        """Return whether a request of this process other than the lookup's may encode an item."""
        return key in self._held or self.pending_lookups.get(key, lookup) is not lookup

    async def run_lookup(self, lookup: Lookup, held: list[EntryKey], *, patient: bool) -> bool:
        """Run a lookup and hold its claims. Return whether the store answered."""
        try:
            return await self.cache.run_lookup(lookup, patient=patient)
        finally:
            held += self.retain_claims(lookup.claimed)

    async def wait_for_turn(
        self, key: EntryKey, wait_s: float, held: list[EntryKey]
    ) -> EntryInfo | None:
        """Return the entry of a key as soon as it is stored.

        Returns:
            None if the key is claimed and in `held`, the store did not answer, or after `wait_s`.
        """
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + wait_s
        waits = iter(POLL_S)
        while True:
            lookup = self._new([key])
            await self.run_lookup(lookup, held, patient=True)
            found = (lookup.found or {}).get(key)
            if found or held or not lookup.settled or clock() > deadline_s:
                return found
            await asyncio.sleep(next(waits, POLL_S[-1]))

    def _new(self, keys: Sequence[EntryKey]) -> Lookup:
        return Lookup(keys, self._owner, CLAIM_S)

    def retain_claims(self, keys: Sequence[EntryKey]) -> Sequence[EntryKey]:
        """Add a holder to claims, which keeps them until `drop_claims`."""
        now_s = asyncio.get_running_loop().time()
        for key in keys:
            self._held.setdefault(key, _Held(now_s)).holders += 1
        if keys and not self._tending:
            self._tending = True
            self.cache.keep_running("claims", self._renew_and_release)
        return keys

    def drop_claims(self, keys: Sequence[EntryKey], after_s: float = 0.0) -> None:
        """Remove a holder from claims. Release unheld ones, at once or `after_s` later."""
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
            self.cache.run_later(self.cache.release(over, self._owner))

    async def _renew_and_release(self) -> None:
        """Renew and release claims until there are none."""
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
            await self.cache.release(over, self._owner)
            await self._renew(
                [key for key, held in self._held.items() if now_s - held.since_s > CLAIM_S / 3]
            )
        self._tending = False

    async def _renew(self, keys: Sequence[EntryKey]) -> None:
        now_s = asyncio.get_running_loop().time()
        for key in keys:
            self._held[key].since_s = now_s
        if keys:
            await self.cache.write("renew", lambda store: store.claim(keys, self._owner, CLAIM_S))


@dataclass(frozen=True, slots=True, eq=False)
class LookupContext:
    """A lookup of `Claims.start_lookup`: a context manager that holds its claims until the exit.

    A `ClaimWait` for one of these claims within the context need not wait.
    """

    _claims: Claims
    _lookup: Lookup
    _claiming: bool
    _patient: bool
    _held: list[EntryKey] = field(default_factory=list)

    def __enter__(self) -> Self:
        """Register the lookup for other requests of this process."""
        if self._claiming:
            self._claims.pending_lookups.update(dict.fromkeys(self._lookup.keys, self._lookup))
        return self

    async def lookup_result(self) -> Lookup | None:
        """Return the completed lookup; None if the store did not answer."""
        answered = await self._claims.run_lookup(self._lookup, self._held, patient=self._patient)
        return self._lookup if answered else None

    def is_encoded_elsewhere(self, identifier: str) -> bool:
        """Return whether another request or another proxy encodes a missing item, as far as known.

        It is not known of other proxies if this lookup could not claim.
        """
        lookup, taken = self._lookup, self._claims.is_used
        return any(
            taken(key, lookup) or lookup.settled
            for key in lookup.keys
            if key.identifier == identifier and key not in lookup.claimed
        )

    def __exit__(self, *_: object) -> None:
        pending = self._claims.pending_lookups
        for key in self._lookup.keys:
            if pending.get(key) is self._lookup:
                del pending[key]
        self._claims.drop_claims(self._held)


@dataclass(slots=True, eq=False)
class ClaimWait:
    """A place in the queue of the requests that need an item encoded: a context manager.

    Other proxies on the same store wait while it is open. After the exit they continue to wait for
    the entry, because an encode instance answers before it has written the entry.

    Attributes:
        entry_coming: whether an encode instance is writing the entry; set by the caller.
    """

    _claims: Claims
    _keys: Sequence[EntryKey]
    _wait_s: float
    _held: list[EntryKey] = field(default_factory=list)
    entry_coming: bool = False

    def __enter__(self) -> Self:
        return self

    @property
    def must_ask(self) -> bool:
        """Whether `wait_turn` has to ask the store: another request may be encoding the item."""
        pending = self._claims.pending_lookups
        return not all(key in pending and key in pending[key].claimed for key in self._keys)

    async def wait_turn(self) -> EntryInfo | None:
        """Wait until this proxy may encode the item, or its entry is stored; return the entry."""
        for key in self._keys:
            # The first waiter reuses the lookup that took the claim. Later ones look it up again.
            lookup = self._claims.pending_lookups.pop(key, None)
            if lookup is None or key not in lookup.claimed:
                return await self._claims.wait_for_turn(key, self._wait_s, self._held)
            self._held += self._claims.retain_claims([key])
        return None

    def __exit__(self, *_: object) -> None:
        """Release the claim: at once if no entry is being written."""
        self._claims.drop_claims(self._held, WRITTEN_WITHIN_S if self.entry_coming else 0.0)
