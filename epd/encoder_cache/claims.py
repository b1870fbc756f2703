"""Claims of missing entries: what makes an entry, and how all others wait for it.

An entry is made by an encode request, or by the consumer of a request that encodes and writes it.
Of the proxies on a store, only the one with the claim makes an entry; of its requests, only one at
a time takes the claim. All others wait for the entry. The lookup that misses claims the entry, in
the same visit to the store. A claim is a hint: any failure costs at most a second encode.
"""

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Literal, Self

from ec_store.bounded import BoundedDict
from ec_store.entry import EntryInfo
from ec_store.keys import EntryKey
from ec_store.opening import ProxyStore
from epd.aio import Flights
from epd.encoder_cache.client import EncoderCache
from epd.encoder_cache.lookup import Lookup

CLAIM_S = 10.0
"""Lifetime of a claim after its last renewal, in seconds."""

WRITTEN_WITHIN_S = 1.0
"""Time in seconds within which an entry is stored after its maker has answered. Its claim is kept
for that time."""

LATE_S = 60.0
"""Time in seconds for which no request waits for an entry that did not appear."""

CONSUMER_WAIT_S = 5.0
"""Maximum wait of a request for entries that other requests' consumers write, in seconds. A server
that hangs or has a long queue must not delay requests that another server could answer."""

POLL_S = (0.005, 0.01, 0.02, 0.05)
"""Delays between two lookups of an entry that is waited for; the last one repeats."""

TEND_S = 0.5
"""Interval of maintenance. Each round renews and releases claims in one call."""

MAX_ENTRIES = 65536
"""Upper bound of the made entries that are remembered."""


class Claims:
    """Takes claims, renews and releases them, and waits for entries.

    Belongs to one event loop.

    Attributes:
        cache: client of the store with the claims.
        consumer_wait_s: maximum wait of a request for entries that consumers write, in seconds.
    """

    def __init__(
        self,
        cache: EncoderCache,
        *,
        claim_s: float = CLAIM_S,
        written_within_s: float = WRITTEN_WITHIN_S,
        consumer_wait_s: float = CONSUMER_WAIT_S,
        tend_s: float = TEND_S,
    ) -> None:
        self.cache = cache
        self.consumer_wait_s = consumer_wait_s
        self._owner = secrets.token_hex(16)
        self._claim_s = claim_s
        self._written_within_s = written_within_s
        self._tend_s = tend_s
        # Time of the release of each claim: None if the claim is free, infinite until a maker ends.
        self._claims: dict[EntryKey, float | None] = {}
        # When entries that were made should have been stored; without those that were found.
        self._due_s: BoundedDict[EntryKey, float] = BoundedDict(MAX_ENTRIES)
        self._polls: Flights[EntryKey, EntryInfo | Literal["free"] | None] = Flights()
        self._tending = False

    async def look_up(self, keys: Sequence[EntryKey], *, patient: bool = False) -> Lookup:
        """Look up entries, and claim the missing ones; `give_back` releases those not taken.

        A `patient` lookup is for a request that cannot do without an answer. A lookup of keys that
        this proxy has all claimed claims nothing.
        """
        claims = not all(key in self._claims for key in keys)
        lookup = Lookup(keys, self._owner if claims else None, self._claim_s)
        lookup.claimed_before = self._claims.keys()
        try:
            await self.cache.run_lookup(lookup, patient=patient)
        except BaseException:  # such as the cancellation of its request
            self._release([key for key in lookup.claimed if key not in self._claims])
            raise
        lookup.settled = lookup.settled or (not claims and lookup.found is not None)
        for key in lookup.found or ():
            self._due_s.pop(key, None)
        for key in lookup.claimed:
            self._claims.setdefault(key, None)
        if lookup.claimed and not self._tending:
            self._tending = True
            self.cache.keep_running("claims", self._renew_and_release)
        return lookup

    def give_back(self, keys: Iterable[EntryKey]) -> None:
        """Release claims that no maker has taken."""
        free = [key for key in keys if self.is_free(key)]
        for key in free:
            del self._claims[key]
        self._release(free)

    def is_free(self, key: EntryKey) -> bool:
        """Return whether this proxy has the claim of an entry, and no maker has taken it."""
        return self._claims.get(key, inf) is None

    def is_late(self, key: EntryKey) -> bool:
        """Return whether a missing entry should have been stored, at most `LATE_S` ago.

        Its maker failed to write it, or is slow, or it was evicted at once.
        """
        late_s = asyncio.get_running_loop().time() - self._due_s.get(key, inf)
        return 0 <= late_s < LATE_S

    def take(self, key: EntryKey) -> bool:
        """Take a free claim for a maker. Return whether it was taken."""
        if not self.is_free(key):
            return False
        self._claims[key] = inf
        return True

    def end(self, keys: Sequence[EntryKey], *, entry_coming: bool) -> None:
        """End the making of entries, and release their claims: later if the entries are coming."""
        if entry_coming:
            until_s = asyncio.get_running_loop().time() + self._written_within_s
            for key in keys:
                self._claims[key] = self._due_s[key] = until_s
            return
        for key in keys:
            del self._claims[key]
        self._release(keys)

    async def poll(self, key: EntryKey) -> EntryInfo | Literal["free"] | None:
        """Return an entry once it is stored, or "free" once its claim is free.

        All waits of this proxy for one entry share one poll. None: the store does not answer, or
        takes no claims, so that it is not known whether anyone makes the entry.
        """
        return await self._polls.join(key, partial(self._poll, key))

    async def _poll(self, key: EntryKey) -> EntryInfo | Literal["free"] | None:
        delays_s = iter(POLL_S)
        while True:
            lookup = await self.look_up([key], patient=True)
            if not lookup.settled or key in (lookup.found or ()):
                return (lookup.found or {}).get(key)
            if self.is_free(key):
                return "free"
            await asyncio.sleep(next(delays_s, POLL_S[-1]))

    def note_late(self, key: EntryKey) -> None:
        """Note that an entry was not stored while a request waited for it."""
        self._due_s[key] = asyncio.get_running_loop().time()

    def _release(self, keys: Sequence[EntryKey]) -> None:
        if keys:
            self.cache.run_later(self.cache.release(keys, self._owner))

    async def _renew_and_release(self) -> None:
        clock = asyncio.get_running_loop().time
        renew_s = clock() + self._claim_s / 3
        while self._claims:
            await asyncio.sleep(self._tend_s)
            now_s = clock()
            over = [key for key, until_s in self._claims.items() if (until_s or inf) <= now_s]
            for key in over:
                del self._claims[key]
            await self.cache.release(over, self._owner)
            if self._claims and now_s >= renew_s:
                renew_s = now_s + self._claim_s / 3
                keys = [*self._claims]
                await self.cache.call("renew", partial(self._renew, keys))
        self._tending = False

    async def _renew(self, keys: Sequence[EntryKey], store: ProxyStore) -> list[bool]:
        return await store.claim(keys, self._owner, self._claim_s)


@dataclass(slots=True, eq=False)
class MakerClaims:
    """Claims that one maker of entries has taken: a context manager that releases them.

    The maker is an encode request, or the consumer of a request. Without a store it has no claims.
    """

    _claims: Claims | None
    _keys: list[EntryKey] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(entry_coming=False)

    def take(self, key: EntryKey) -> bool:
        """Take a free claim. Return whether this maker has it, maybe from before."""
        if key not in self._keys and self._claims is not None and self._claims.take(key):
            self._keys.append(key)
        return key in self._keys

    def wait_limit_s(self, keys: Sequence[EntryKey | None]) -> float:
        """Take the free claims. Return how long a request may wait for all the entries, in seconds.

        It is 0 if its consumer makes one of them: two requests must not wait for each other.
        """
        claims = self._claims
        if claims is None:
            return 0.0
        shared = [key for key in keys if key is not None and not claims.is_late(key)]
        for key in shared:
            self.take(key)
        return 0.0 if self._keys or len(shared) < len(keys) else claims.consumer_wait_s

    async def wait(self, key: EntryKey, wait_s: float) -> EntryInfo | None:
        """Return an entry that others make, as soon as it is stored.

        None: this maker makes the entry. It has the claim if the other maker failed. It has none if
        the store does not answer, or if the entry did not appear in time: such an entry is late,
        and for `LATE_S` no request begins to wait for it.
        """
        claims = self._claims
        if claims is None or claims.is_late(key):
            return None
        try:
            async with asyncio.timeout(wait_s):
                while not self.take(key):
                    if (found := await claims.poll(key)) != "free":
                        return found
        except TimeoutError:
            if wait_s > claims.consumer_wait_s / 2:  # else it was the request that had no time
                claims.note_late(key)
        finally:
            claims.give_back([key])
        return None

    def hand_over(self) -> "MakerClaims":
        """Return the claims for the answer of the request, and have none any more."""
        keys, self._keys = self._keys, []
        return MakerClaims(self._claims, keys)

    def end(self, *, entry_coming: bool) -> None:
        """Release the claims; `entry_coming` tells whether the entries are being written."""
        keys, self._keys = self._keys, []
        if keys and self._claims is not None:
            self._claims.end(keys, entry_coming=entry_coming)
