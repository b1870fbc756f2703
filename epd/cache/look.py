"""One visit to the encoder-cache store, made on a thread or begun on the event loop."""

import time
from collections.abc import Mapping, Sequence

from ec_store import EntryInfo, EntryKey, Store, StoreError


class Look:
    """A look for entries, and a claim to those that are not there.

    Attributes:
        keys: what is looked for.
        found: what is there, once that is known.
        took_s: how long the store took to say so.
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

    @property
    def over(self) -> bool:
        """Whether nothing is left to do: what is there is known, and nothing is to be claimed."""
        return self.found is not None and (self._owner is None or not self._missing(self.found))

    def run(self, store: Store) -> None:
        """Make the visit, or what is left of it, on a thread: claims may wait for others.

        Raises:
            StoreError: the store gives no answer.
        """
        found = self.look_up(store) if self.found is None else self.found
        missing = self._missing(found)
        if missing and self._owner is not None and not self._left:
            try:
                self._claim(store, self._owner, missing)
            except (StoreError, ValueError) as error:
                self.problem = error

    def look_up(self, store: Store) -> Mapping[EntryKey, EntryInfo]:
        """Find out what is there, and claim nothing.

        Raises:
            StoreError: the store gives no answer.
        """
        begun_s = time.perf_counter()
        try:
            infos = store.lookup(self.keys)
        finally:
            self.took_s = time.perf_counter() - begun_s
        self.found = {info.key: info for info in infos if info is not None}
        return self.found

    def _missing(self, found: Mapping[EntryKey, EntryInfo]) -> Sequence[EntryKey]:
        return [key for key in self.keys if key not in found]

    def _claim(self, store: Store, owner: str, missing: Sequence[EntryKey]) -> None:
        answers = store.claim_or_find(missing, owner, self._claim_s)
        late = {info.key: info for info in answers if isinstance(info, EntryInfo)}
        self.found = {**(self.found or {}), **late}
        self.claimed = [key for key, answer in zip(missing, answers, strict=True) if answer is True]
        self.settled = True
        if self._left and self.claimed:  # looked at after `claimed` is set, as `leave` is before
            store.release(self.claimed, owner)

    def leave(self) -> None:
        """Wait for it no longer: what it claims from now on is given back at once."""
        self._left = True

    def claim_nothing(self) -> None:
        """Look only."""
        self.kept_from_claiming, self._owner = self._owner is not None, None
