"""Lookup in the encoder store with claims of missing entries.

A store that answers messages gets one for the whole lookup. Other stores are called, on a thread or
on the event loop. A call to a store in memory takes some microseconds. Passing it to a thread and
back takes several times as long. A call on the event loop, however, blocks all other requests. The
choice depends on the durations of earlier calls.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from ec_store.base import Store
from ec_store.entry import EntryInfo
from ec_store.errors import StoreError
from ec_store.keys import EntryKey

SLOW_S = 0.001
"""Duration above which a call is slow."""

MOST_SLOW = 0.5
"""Share of slow calls on the event loop, above which calls are made on threads. Single slow calls
say little: the kernel may have given the core to another process meanwhile."""

WEIGHT = 0.2
"""Weight of the latest call in that share: four slow calls in a row exceed it."""

STALLED_S = 0.1
"""Duration of a single call that ends calls on the event loop."""

THREADS_S = 5.0
"""Minimum time for which calls then run on threads."""

MOST_KEYS = 16
"""Maximum number of entries in one call on the event loop."""


class AtOnce:
    """Decides by the durations of earlier lookups.

    A fast lookup on a thread is required before the first one on the event loop: at the start,
    after slow lookups, and after a timeout. While small lookups run on the event loop, a large one
    on a thread changes nothing.
    """

    def __init__(self) -> None:
        self._trusted = False
        self._slow_share = 0.0
        self._threads_until_s = 0.0

    def allows_inline(self, keys: int, now_s: float) -> bool:
        """Return whether a lookup of this many entries runs on the event loop."""
        return self._trusted and keys <= MOST_KEYS and now_s >= self._threads_until_s

    def took_on_loop(self, seconds: float, now_s: float) -> None:
        self._slow_share += WEIGHT * ((seconds > SLOW_S) - self._slow_share)
        if self._slow_share > MOST_SLOW or seconds >= STALLED_S:
            self._stop_fast_path(now_s)

    def took_on_thread(self, seconds: float | None, now_s: float) -> None:
        """Record the duration of a lookup on a thread; None for a timeout."""
        if seconds is None:
            self._stop_fast_path(now_s)
        elif not self._trusted or now_s < self._threads_until_s:
            self._trusted, self._slow_share = seconds <= SLOW_S, 0.0

    def _stop_fast_path(self, now_s: float) -> None:
        self._trusted = False
        self._threads_until_s = now_s + THREADS_S


Claim = Callable[[Sequence[EntryKey], str, float], Sequence[bool]]
"""Claims entries for an owner, for a number of seconds. Returns for each whether it is held."""


class MessageStore(Protocol):
    """Store with calls that wait on the event loop; results and errors are those of `Store`."""

    async def lookup(self, keys: Sequence[EntryKey]) -> list[EntryInfo | None]: ...

    async def claim_or_find(
        self, keys: Sequence[EntryKey], owner: str, seconds: float
    ) -> list[EntryInfo | bool]: ...

    async def release(self, keys: Sequence[EntryKey], owner: str) -> None: ...


class Lookup:
    """A lookup of entries, and claims of the missing ones.

    Attributes:
        found: stored entries; None until the store has answered.
        took_s: duration of the lookup; on the event loop including the claims.
        claimed: missing keys that were claimed.
        settled: whether the store has answered the claims of all missing keys.
        problem: error of the claims, if any.
        kept_from_claiming: whether `claim_nothing` disabled the claims.
    """

    def __init__(
        self, keys: Sequence[EntryKey], owner: str | None = None, claim_s: float = 0.0
    ) -> None:
        """Look up `keys`, and claim missing ones for `claim_s` if there is an owner."""
        self.keys = keys
        self.found: Mapping[EntryKey, EntryInfo] | None = None
        self.took_s: float | None = None
        self.claimed: Sequence[EntryKey] = ()
        self.settled = False
        self.problem: Exception | None = None
        self.kept_from_claiming = False
        self._owner = owner
        self._claim_s = claim_s
        self._left = False

    def run(self, store: Store) -> None:
        """Look up the entries and claim the missing ones, on a thread: a claim may block.

        Raises:
            StoreError: the store did not answer.
        """
        begun_s = time.perf_counter()
        try:
            missing = self._look_up(store)
        finally:
            self.took_s = time.perf_counter() - begun_s
        if missing:
            self._claim(missing, store, partial(self._claim_or_find, store))

    def run_at_once(self, store: Store) -> None:
        """Look up the entries and claim the missing ones without blocking.

        An entry that is written between the two steps is encoded a second time. On a thread that
        window is longer, so `run` checks for such entries.

        Raises:
            StoreError: the store did not answer.
        """
        begun_s = time.perf_counter()
        try:
            missing = self._look_up(store)
            if missing:
                self._claim(missing, store, partial(store.claim, wait=False))
        finally:
            self.took_s = time.perf_counter() - begun_s

    async def ask(self, store: MessageStore) -> None:
        """Look up the entries and claim the missing ones with one message.

        Raises:
            StoreError: the store did not answer.
        """
        owner, answers = self._owner, list[EntryInfo | bool | None]()
        if owner is None:
            answers += await store.lookup(self.keys)
        else:
            answers += await store.claim_or_find(self.keys, owner, self._claim_s)
        self.found = {info.key: info for info in answers if isinstance(info, EntryInfo)}
        if owner is not None:
            self.settled = not all(isinstance(answer, EntryInfo) for answer in answers)
            self.claimed = [
                key for key, answer in zip(self.keys, answers, strict=True) if answer is True
            ]
            if self._left and self.claimed:
                await store.release(self.claimed, owner)

    def _look_up(self, store: Store) -> Sequence[EntryKey]:
        """Look up the entries. Return the missing keys."""
        infos = store.lookup(self.keys)
        self.found = {info.key: info for info in infos if info is not None}
        return [key for key, info in zip(self.keys, infos, strict=True) if info is None]

    def _claim(self, missing: Sequence[EntryKey], store: Store, claim: Claim) -> None:
        """Claim the missing entries, unless claims are disabled or the request is abandoned."""
        owner = self._owner
        if owner is None or self._left:
            return
        try:
            held = claim(missing, owner, self._claim_s)
            self.claimed = [key for key, mine in zip(missing, held, strict=True) if mine]
            self.settled = True
            # Read after `claimed` is set: an abandoning request sets `_left` before it reads
            # `claimed`.
            if self._left and self.claimed:
                store.release(self.claimed, owner)
        except (StoreError, ValueError) as error:
            self.problem = error

    def _claim_or_find(
        self, store: Store, missing: Sequence[EntryKey], owner: str, seconds: float
    ) -> Sequence[bool]:
        """Claim entries, and add those that were written since the lookup to `found`."""
        answers = store.claim_or_find(missing, owner, seconds)
        late = {info.key: info for info in answers if isinstance(info, EntryInfo)}
        self.found = {**(self.found or {}), **late}
        return [answer is True for answer in answers]

    def abandon_visit(self) -> None:
        """Release at once all claims that the visit takes from now on."""
        self._left = True

    def claim_nothing(self) -> None:
        self.kept_from_claiming, self._owner = self._owner is not None, None
