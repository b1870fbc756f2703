"""Claims of this proxy, so that other proxies on its store wait for its encode.

A claim is part of the lookup that misses, in the same visit to the store. It is a hint: any failure
costs at most a second encode.
"""

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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

TEND_S = 0.5
"""Interval of maintenance. Each round renews and releases claims in one call."""


@dataclass(slots=True)
class _Claim:
    """A claim of this proxy.

    Attributes:
        since_s: time of the last claim or renewal, on the event loop's clock.
        holders: number of lookups and encodes that need it.
        until_s: time until which it is kept without a holder.
        fresh: whether the lookup that took it is not over, and no encode has used it.
    """

    since_s: float
    holders: int = 0
    until_s: float = 0.0
    fresh: bool = False


class Claims:
    """Takes claims, renews them while they have holders, and releases them.

    Belongs to one event loop.

    Attributes:
        cache: client of the store with the claims.
    """

    def __init__(
        self,
        cache: EncoderCache,
        *,
        claim_s: float = CLAIM_S,
        written_within_s: float = WRITTEN_WITHIN_S,
        tend_s: float = TEND_S,
    ) -> None:
        self.cache = cache
        self._owner = secrets.token_hex(16)
        self._claim_s = claim_s
        self._written_within_s = written_within_s
        self._tend_s = tend_s
        self._claims: dict[EntryKey, _Claim] = {}
        self._pending: set[EntryKey] = set()
        self._tending = False

    async def look_up(self, keys: Sequence[EntryKey], *, patient: bool = False) -> Lookup:
        """Look up entries, and claim the missing ones until `end_lookup`.

        A `patient` lookup is for a request that cannot do without an answer. It claims nothing. Nor
        does one with keys that this process has claimed or is looking up.
        """
        claiming = not patient and not any(self.is_used(key) for key in keys)
        lookup = self.new_lookup(keys) if claiming else Lookup(keys)
        if claiming:
            self._pending.update(keys)
        try:
            await self.cache.run_lookup(lookup, patient=patient)
        except BaseException:  # such as the cancellation of its request
            self.drop_claims(self.hold_claims(lookup.claimed))
            raise
        finally:
            if claiming:
                self._pending.difference_update(keys)
        lookup.held_keys = self.hold_claims(lookup.claimed, fresh=True)
        return lookup

    def end_lookup(self, lookup: Lookup) -> None:
        self.drop_claims(lookup.held_keys)

    def is_encoded_elsewhere(self, key: EntryKey, lookup: Lookup) -> bool:
        """Return whether another request or another proxy encodes an entry that a lookup misses.

        It is not known of other proxies if the lookup could not claim.
        """
        return key not in lookup.held_keys and (lookup.settled or self.is_used(key))

    def is_used(self, key: EntryKey) -> bool:
        """Return whether this process has claimed an entry, or may have in a moment."""
        return key in self._claims or key in self._pending

    def new_lookup(self, keys: Sequence[EntryKey]) -> Lookup:
        """Return a lookup that claims missing entries, which `hold_claims` then keeps."""
        return Lookup(keys, self._owner, self._claim_s)

    async def claim_missing(self, key: EntryKey) -> Lookup:
        """Look up an entry, and claim it if it is missing and this process does not use it.

        The claim is kept for `written_within_s` for a request that takes it with `take_fresh`.
        """
        claiming = not self.is_used(key)
        lookup = self.new_lookup([key]) if claiming else Lookup([key])
        if claiming:
            self._pending.add(key)
        try:
            await self.cache.run_lookup(lookup, patient=True)
        finally:
            if claiming:
                self._pending.discard(key)
            self.drop_claims(self.hold_claims(lookup.claimed, fresh=True), entry_coming=True)
        return lookup

    def take_fresh(self, key: EntryKey) -> bool:
        """Hold the claim of a lookup that is not over. Return False if there is none to take."""
        claim = self._claims.get(key)
        if claim is None or not claim.fresh:
            return False
        claim.fresh = False
        claim.holders += 1
        return True

    def hold_claims(self, keys: Sequence[EntryKey], *, fresh: bool = False) -> Sequence[EntryKey]:
        """Add a holder to claims, which keeps them until `drop_claims`."""
        now_s = asyncio.get_running_loop().time()
        for key in keys:
            claim = self._claims.setdefault(key, _Claim(now_s))
            claim.holders += 1
            claim.fresh = fresh
        if keys and not self._tending:
            self._tending = True
            self.cache.keep_running("claims", self._renew_and_release)
        return keys

    def drop_claims(self, keys: Sequence[EntryKey], *, entry_coming: bool = False) -> None:
        """Remove a holder from claims, and release those without one.

        If an entry is coming, its claim is kept for the time that the instance needs to write it.
        """
        now_s = asyncio.get_running_loop().time()
        until_s = now_s + self._written_within_s if entry_coming else 0.0
        for key in keys:
            claim = self._claims[key]
            claim.holders -= 1
            claim.until_s = max(claim.until_s, until_s)
        if over := self._pop_over(keys, now_s):
            self.cache.run_later(self.cache.release(over, self._owner))

    def _pop_over(self, keys: Iterable[EntryKey], now_s: float) -> list[EntryKey]:
        over = [
            key
            for key in keys
            if not self._claims[key].holders and self._claims[key].until_s <= now_s
        ]
        for key in over:
            del self._claims[key]
        return over

    async def _renew_and_release(self) -> None:
        clock = asyncio.get_running_loop().time
        while self._claims:
            await asyncio.sleep(self._tend_s)
            await self.cache.release(self._pop_over([*self._claims], clock()), self._owner)
            await self._renew(
                [
                    key
                    for key, claim in self._claims.items()
                    if clock() - claim.since_s > self._claim_s / 3
                ]
            )
        self._tending = False

    async def _renew(self, keys: Sequence[EntryKey]) -> None:
        now_s = asyncio.get_running_loop().time()
        for key in keys:
            self._claims[key].since_s = now_s
        if keys:
            await self.cache.call(
                "renew", lambda store: store.claim(keys, self._owner, self._claim_s)
            )


@dataclass(slots=True, eq=False)
class EncodeClaim:
    """Claim of an entry while an encode instance encodes it: a context manager.

    Other proxies on the same store wait while it is open. After the exit they continue to wait for
    the entry, because an encode instance answers before it has written the entry.

    Attributes:
        is_held: whether this proxy has the claim.
        entry_coming: whether an encode instance is writing the entry; set by the caller.
    """

    _claims: Claims
    _key: EntryKey
    is_held: bool = False
    entry_coming: bool = False

    def __enter__(self) -> Self:
        """Take the claim of the request's lookup, unless another encode has used it."""
        self.is_held = self._claims.take_fresh(self._key)
        return self

    async def wait_for_turn(self, wait_s: float) -> EntryInfo | None:
        """Return the entry as soon as it is stored. None: this proxy may encode it.

        It may if it gets the claim, if the store does not answer, or after `wait_s`.
        """
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + wait_s
        delays_s = iter(POLL_S)
        while True:
            lookup = self._claims.new_lookup([self._key])
            try:
                await self._claims.cache.run_lookup(lookup, patient=True)
            finally:
                self.is_held = bool(self._claims.hold_claims(lookup.claimed))
            found = (lookup.found or {}).get(self._key)
            if found or self.is_held or not lookup.settled or clock() > deadline_s:
                return found
            await asyncio.sleep(next(delays_s, POLL_S[-1]))

    def __exit__(self, *_: object) -> None:
        """Release the claim: at once if no entry is being written."""
        if self.is_held:
            self._claims.drop_claims([self._key], entry_coming=self.entry_coming)
