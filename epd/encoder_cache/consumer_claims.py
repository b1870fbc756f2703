"""Claims of entries that the consumers of requests encode and write, and waits for these entries.

In a fleet without encode instances, a request with a new item holds the claim of its entry until
its answer begins. Other requests for the item wait for the entry, all requests of this process
together.
"""

import asyncio
from collections.abc import Collection, Sequence
from functools import partial
from typing import Literal, Self

from ec_store.bounded import BoundedDict
from ec_store.entry import EntryInfo
from ec_store.keys import EntryKey
from epd.aio import Flights
from epd.encoder_cache.claims import POLL_S, WRITTEN_WITHIN_S, Claims

WAIT_S = 5.0
"""Maximum wait of a request for entries that other requests' consumers write, in seconds. A server
that hangs or has a long queue must not delay requests that another server could answer."""

LATE_S = 60.0
"""Time in seconds for which no request waits for an entry that did not appear."""

MAX_ENTRIES = 65536
"""Upper bound of the entries that are remembered."""


class ConsumerWrites:
    """Entries that consumers are to write. Belongs to one event loop.

    Attributes:
        claims: claims of this proxy.
        wait_s: maximum wait of a request for its entries, in seconds.
    """

    def __init__(
        self, claims: Claims, *, wait_s: float = WAIT_S, written_within_s: float = WRITTEN_WITHIN_S
    ) -> None:
        self.claims = claims
        self.wait_s = wait_s
        self._written_within_s = written_within_s
        self._due_s: BoundedDict[EntryKey, float] = BoundedDict(MAX_ENTRIES)
        self._waits: Flights[EntryKey, EntryInfo | Literal["free"] | None] = Flights()

    def expect(self, keys: Sequence[EntryKey]) -> None:
        """Note that consumers are writing entries, which are late after a moment."""
        due_s = asyncio.get_running_loop().time() + self._written_within_s
        self._due_s.update(dict.fromkeys(keys, due_s))

    def note_late(self, key: EntryKey) -> None:
        """Note that an entry was not stored while requests waited for it."""
        self._due_s[key] = asyncio.get_running_loop().time()

    def is_late(self, key: EntryKey) -> bool:
        """Return whether a missing entry should have been stored, at most `LATE_S` ago.

        Its consumer failed to write it, or is slow, or it was evicted at once.
        """
        late_s = asyncio.get_running_loop().time() - self._due_s.get(key, float("inf"))
        return 0 <= late_s < LATE_S

    async def wait_for_entry(self, key: EntryKey) -> EntryInfo | Literal["free"] | None:
        """Return an entry once it is stored, or "free" once this proxy has its claim.

        None: the store does not answer, or the entry is late.
        """
        return await self._waits.join(key, partial(self._poll, key))

    async def _poll(self, key: EntryKey) -> EntryInfo | Literal["free"] | None:
        clock = asyncio.get_running_loop().time
        deadline_s, delays_s = clock() + self.wait_s, iter(POLL_S)
        while True:
            lookup = await self.claims.claim_missing(key)
            if lookup.found is None:
                return None
            if key in lookup.found:
                return lookup.found[key]
            if lookup.claimed:
                return "free"
            if clock() > deadline_s:
                self.note_late(key)
                return None
            await asyncio.sleep(next(delays_s, POLL_S[-1]))


class ConsumerClaims:
    """Claims of the entries that the consumer of one request writes: a context manager.

    The exit of the context releases those that were not handed over to the answer.
    """

    def __init__(self, writes: ConsumerWrites, keys: Sequence[EntryKey] = ()) -> None:
        self._writes = writes
        self._keys = list(keys)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(entry_coming=False)

    def hand_over(self) -> "ConsumerClaims":
        """Return the claims for the answer of the request, and hold none any more."""
        keys, self._keys = self._keys, []
        return ConsumerClaims(self._writes, keys)

    @property
    def wait_s(self) -> float:
        """Maximum wait of the request for its entries, in seconds."""
        return self._writes.wait_s

    def keep_only(self, keys: Collection[EntryKey]) -> None:
        """Release the claims of other entries, which an earlier attempt needed."""
        others = [key for key in self._keys if key not in keys]
        self._keys = [key for key in self._keys if key in keys]
        self._writes.claims.drop_claims(others)

    def is_late(self, key: EntryKey) -> bool:
        """Return whether no request waits for this missing entry (`ConsumerWrites`)."""
        return self._writes.is_late(key)

    def take(self, key: EntryKey) -> bool:
        """Hold a claim that this proxy has for a request. Return whether this request has it."""
        if key in self._keys:
            return True
        taken = self._writes.claims.take_fresh(key)
        if taken:
            self._keys.append(key)
        return taken

    async def wait_for_entry(self, key: EntryKey, wait_s: float) -> EntryInfo | None:
        """Return the entry that another request's consumer writes, as soon as it is stored.

        None: the consumer of this request encodes it, because this request has its claim now, the
        store does not answer, or the entry is late.
        """
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    found = await self._writes.wait_for_entry(key)
                    if found != "free":
                        return found
                    if self.take(key):
                        return None
        except TimeoutError:
            self._writes.note_late(key)
            return None

    def end(self, *, entry_coming: bool) -> None:
        """Release the claims; `entry_coming` tells whether the consumer is writing the entries."""
        keys, self._keys = self._keys, []
        self._writes.claims.drop_claims(keys, entry_coming=entry_coming)
        if entry_coming:
            self._writes.expect(keys)
