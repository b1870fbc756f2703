"""One visit to the encoder-cache store, on a thread or on the event loop."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ec_store import EntryInfo, EntryKey, Store, StoreError

Claim = Callable[[Sequence[EntryKey], str, float], Sequence[bool]]
"""Claims entries for an owner, for a number of seconds. Returns for each whether it is held."""


class Look:
    """A lookup of entries, and claims of the missing ones.

    Attributes:
        keys: keys to look up.
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

    def leave(self) -> None:
        """Abandon the visit: release at once all claims that it takes from now on."""
        self._left = True

    def claim_nothing(self) -> None:
        """Disable the claims of this lookup."""
        self.kept_from_claiming, self._owner = self._owner is not None, None
