"""One visit to the encoder-cache store, made on a thread or on the event loop."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ec_store import EntryInfo, EntryKey, Store, StoreError

Claim = Callable[[Sequence[EntryKey], str, float], Sequence[bool]]
"""Claims entries for an owner, for so many seconds; whether each is held."""


class Look:
    """A look for entries, and a claim to those that are not there.

    Attributes:
        keys: what is looked for.
        found: what is there, once that is known.
        took_s: how long the store took to say so; on the event loop, claims included.
        claimed: what is not there, and was claimed.
        settled: whether the store has said of all that is not there who has claimed it.
        problem: why nothing could be claimed.
        kept_from_claiming: whether it was to claim something, and was told not to.
    """

    def __init__(
        self, keys: Sequence[EntryKey], owner: str | None = None, claim_s: float = 0.0
    ) -> None:
        """Look for `keys`, and claim them for `claim_s`, unless there is no owner."""
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
        """Look up the entries and claim the missing ones, on a thread: a claim may wait for others.

        Raises:
            StoreError: the store gives no answer.
        """
        begun_s = time.perf_counter()
        try:
            missing = self._look_up(store)
        finally:
            self.took_s = time.perf_counter() - begun_s
        if missing:
            self._claim(missing, store, partial(self._claim_or_find, store))

    def run_at_once(self, store: Store) -> None:
        """Look up the entries and claim the missing ones, and wait for nothing.

        An entry that is written between the two is not seen: it is encoded a second time. On a
        thread that time is longer, and the store is asked once more.

        Raises:
            StoreError: the store gives no answer.
        """
        begun_s = time.perf_counter()
        try:
            missing = self._look_up(store)
            if missing:
                self._claim(missing, store, partial(store.claim, wait=False))
        finally:
            self.took_s = time.perf_counter() - begun_s

    def _look_up(self, store: Store) -> Sequence[EntryKey]:
        """Look up the entries, and return the keys of the missing ones."""
        infos = store.lookup(self.keys)
        self.found = {info.key: info for info in infos if info is not None}
        return [key for key, info in zip(self.keys, infos, strict=True) if info is None]

    def _claim(self, missing: Sequence[EntryKey], store: Store, claim: Claim) -> None:
        """Claim the missing entries, unless the look claims nothing or nobody waits for it."""
        owner = self._owner
        if owner is None or self._left:
            return
        try:
            held = claim(missing, owner, self._claim_s)
            self.claimed = [key for key, mine in zip(missing, held, strict=True) if mine]
            self.settled = True
            # Read after `claimed` is set: a request that leaves sets it before it reads `claimed`.
            if self._left and self.claimed:
                store.release(self.claimed, owner)
        except (StoreError, ValueError) as error:
            self.problem = error

    def _claim_or_find(
        self, store: Store, missing: Sequence[EntryKey], owner: str, seconds: float
    ) -> Sequence[bool]:
        """Claim entries, and find those that were written since they were looked up."""
        answers = store.claim_or_find(missing, owner, seconds)
        late = {info.key: info for info in answers if isinstance(info, EntryInfo)}
        self.found = {**(self.found or {}), **late}
        return [answer is True for answer in answers]

    def leave(self) -> None:
        """Wait for it no longer: what it claims from now on is given back at once."""
        self._left = True

    def claim_nothing(self) -> None:
        """Look only."""
        self.kept_from_claiming, self._owner = self._owner is not None, None
