"""One visit to the encoder-cache store, made on a thread."""

from collections.abc import Mapping, Sequence

from ec_store import EntryInfo, EntryKey, Store, StoreError


class Look:
    """A look for entries, and a claim to those that are not there.

    Attributes:
        keys: what is looked for.
        found: what is there, once that is known.
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
        self.claimed: Sequence[EntryKey] = ()
        self.settled = False
        self.problem: Exception | None = None
        self.kept_from_claiming = False
        self._owner = owner
        self._claim_s = claim_s
        self._left = False

    def run(self, store: Store) -> None:
        """Make the visit, on a thread.

        Raises:
            StoreError: the store gives no answer.
        """
        infos = store.lookup(self.keys)
        self.found = {info.key: info for info in infos if info is not None}
        missing = [key for key in self.keys if key not in self.found]
        if missing and self._owner is not None and not self._left:
            try:
                self._claim(store, self._owner, missing)
            except (StoreError, ValueError) as error:
                self.problem = error

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
