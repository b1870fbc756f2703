"""Claims of missing entries: what makes an entry, and how all others wait for it.

An entry is made by an encode request, or by the consumer of a request that encodes and writes it.
Of the proxies on a store, only the one with the claim makes an entry; of its requests, only one at
a time uses the claim. All others wait for the entry. A claim is a hint: any failure costs at most
a second encode. The life of a missing entry:

    call                 afterwards
    Claims.look_up       the proxy has its claim, which is unused; or another proxy has it
    Claims.use           one request uses the claim: it makes the entry
    Claims.wait          the entry is stored; or the claim was released, and this request uses it
    Claim.end            the claim is released: at once, or when the entry should be stored
    Claims.give_back     the claim is released, if no request uses it
"""

import asyncio
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Literal, NamedTuple, Self

from ec_store.bounded import BoundedDict
from ec_store.entry import EntryInfo
from ec_store.errors import StoreError
from ec_store.keys import EntryKey
from ec_store.opening import ProxyStore
from epd.aio import Flights
from epd.encoder_cache.client import EncoderCache

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


class Lookup(NamedTuple):
    """Result of a lookup.

    Attributes:
        entries: the stored entries; None if the store did not answer.
        claimed_keys: missing entries that were claimed, for `Claims.give_back`. None: no entry is
            missing, or the store did not say whether anyone makes the missing ones.
    """

    entries: Mapping[EntryKey, EntryInfo] | None
    claimed_keys: Sequence[EntryKey] | None


@dataclass(slots=True, eq=False)
class Claim:
    """Claim of this proxy, of a missing entry. The request that makes the entry enters it.

    Attributes:
        release_s: time of its release: None while it is unused, infinite while a request uses it.
    """

    _claims: "Claims"
    _key: EntryKey
    release_s: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.end(entry_coming=error is None)

    def end(self, *, entry_coming: bool) -> None:
        """End the making of the entry, once; `entry_coming` tells whether it is being written."""
        if self.release_s != inf:
            return
        if entry_coming:
            self.release_s = self._claims.expect_entry(self._key)
        else:
            self.release_s = None
            self._claims.give_back([self._key])


def end_claims(claims: list[Claim], *, entries_coming: bool) -> None:
    """End the claims of the entries that a request's consumer makes, and forget them."""
    for claim in claims:
        claim.end(entry_coming=entries_coming)
    claims.clear()


class WaitResult(NamedTuple):
    """Result of a wait for an entry that others make: the entry, or the claim to make it, if any.

    With neither, the request makes the entry without a claim.
    """

    entry: EntryInfo | None = None
    claim: Claim | None = None


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
        self._claims: dict[EntryKey, Claim] = {}
        # When entries that were made should have been stored; without those that were found.
        self._due_s: BoundedDict[EntryKey, float] = BoundedDict(MAX_ENTRIES)
        self._polls: Flights[EntryKey, EntryInfo | Literal["unused"] | None] = Flights()
        self._tending = False

    async def look_up(
        self,
        keys: Sequence[EntryKey],
        *,
        patient: bool = False,
        host_entries: Mapping[EntryKey, EntryInfo] | None = None,
    ) -> Lookup:
        """Look up entries, and claim the missing ones; `give_back` releases those not used.

        A `patient` lookup is for a request that cannot do without an answer. Missing entries that
        this proxy has all claimed are not claimed again. `host_entries` are those that a look-up of
        all keys has found a moment ago; None: there was none.
        """
        entries: Mapping[EntryKey, EntryInfo] | None
        if host_entries is None:
            entries = await self.cache.find_entries(keys, patient=patient)
        else:
            entries = self.cache.note_entries(
                host_entries[key] for key in keys if key in host_entries
            )
        missing = [key for key in keys if key not in entries] if entries is not None else []
        claimed_keys: list[EntryKey] | None = None
        if missing and all(key in self._claims for key in missing):
            claimed_keys = []
        elif missing:
            answers = await self.cache.call("claim", partial(self._claim_or_find, missing))
            if answers is not None:
                entries = {**(entries or {}), **self.cache.note_entries(answers)}
                pairs = zip(missing, answers, strict=True)
                claimed_keys = [key for key, answer in pairs if answer is True]
        for key in entries or ():
            self._due_s.pop(key, None)
        for key in claimed_keys or ():
            self._claims.setdefault(key, Claim(self, key))
        if claimed_keys and not self._tending:
            self._tending = True
            self.cache.keep_running("claims", self._renew_and_release)
        return Lookup(entries, claimed_keys)

    async def _claim_or_find(
        self, keys: Sequence[EntryKey], store: ProxyStore
    ) -> list[EntryInfo | bool]:
        """Claim entries that are not stored. If the request ends before, they are released."""
        claim_task = asyncio.ensure_future(store.claim_or_find(keys, self._owner, self._claim_s))
        try:
            return await asyncio.shield(claim_task)
        except asyncio.CancelledError:
            self.cache.run_later(self._release_unused(keys, claim_task, store))
            raise

    async def _release_unused(
        self,
        keys: Sequence[EntryKey],
        claim_task: asyncio.Future[list[EntryInfo | bool]],
        store: ProxyStore,
    ) -> None:
        # Not by `call`, which skips the store after such failures.
        with suppress(StoreError, ValueError):
            answers = zip(keys, await claim_task, strict=True)
            claimed_keys = [key for key, answer in answers if answer is True]
            if unused := [key for key in claimed_keys if key not in self._claims]:
                await store.release(unused, self._owner)

    def is_unused(self, key: EntryKey) -> bool:
        """Return whether this proxy has the claim of an entry, and no request uses it."""
        claim = self._claims.get(key)
        return claim is not None and claim.release_s is None

    def is_late(self, key: EntryKey) -> bool:
        """Return whether a missing entry should have been stored, at most `LATE_S` ago.

        Its maker failed to write it, or is slow, or it was evicted at once.
        """
        late_s = asyncio.get_running_loop().time() - self._due_s.get(key, inf)
        return 0 <= late_s < LATE_S

    def use(self, key: EntryKey) -> Claim | None:
        """Return the claim of an entry for the request that makes it; None if it is not unused."""
        if not self.is_unused(key):
            return None
        claim = self._claims[key]
        claim.release_s = inf
        return claim

    async def wait(self, key: EntryKey, limit_s: float) -> WaitResult:
        """Return an entry that others make, as soon as it is stored.

        Otherwise the caller makes it: with the claim if the other maker failed, and without if the
        store does not answer, or if the entry did not appear in time. Such an entry is late, and
        for `LATE_S` no request begins to wait for it.
        """
        if self.is_late(key):
            return WaitResult()
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    if (claim := self.use(key)) is not None:
                        return WaitResult(claim=claim)
                    # All waits of this proxy for one entry share their lookups.
                    result = await self._polls.join(key, partial(self._poll, key))
                    if result != "unused":
                        return WaitResult(result)
        except TimeoutError:
            if limit_s > self.consumer_wait_s / 2:  # else it was the request that had no time
                self._due_s[key] = asyncio.get_running_loop().time()
        finally:
            self.give_back([key])
        return WaitResult()

    async def _poll(self, key: EntryKey) -> EntryInfo | Literal["unused"] | None:
        """Return an entry once it is stored, or "unused" once this proxy has its claim unused.

        None: the store does not answer, or takes no claims, so that it is not known whether anyone
        makes the entry.
        """
        delays_s = iter(POLL_S)
        while True:
            lookup = await self.look_up([key], patient=True)
            entry = (lookup.entries or {}).get(key)
            if entry is not None or lookup.claimed_keys is None:
                return entry
            if self.is_unused(key):
                return "unused"
            await asyncio.sleep(next(delays_s, POLL_S[-1]))

    def expect_entry(self, key: EntryKey) -> float:
        """Expect that an entry is stored soon; return the time after which it is late."""
        self._due_s[key] = asyncio.get_running_loop().time() + self._written_within_s
        return self._due_s[key]

    def give_back(self, keys: Iterable[EntryKey]) -> None:
        """Release claims that no request uses."""
        unused_keys = [key for key in keys if self.is_unused(key)]
        for key in unused_keys:
            del self._claims[key]
        if unused_keys:
            self.cache.run_later(self.cache.release(unused_keys, self._owner))

    async def _renew_and_release(self) -> None:
        clock = asyncio.get_running_loop().time
        renew_s = clock() + self._claim_s / 3
        while self._claims:
            await asyncio.sleep(self._tend_s)
            now_s = clock()
            due_keys = [
                key for key, claim in self._claims.items() if (claim.release_s or inf) <= now_s
            ]
            for key in due_keys:
                del self._claims[key]
            await self.cache.release(due_keys, self._owner)
            if self._claims and now_s >= renew_s:
                renew_s = now_s + self._claim_s / 3
                keys = [*self._claims]
                await self.cache.call("renew", partial(self._renew, keys))
        self._tending = False

    async def _renew(self, keys: Sequence[EntryKey], store: ProxyStore) -> list[bool]:
        return await store.claim(keys, self._owner, self._claim_s)
