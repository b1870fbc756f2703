"""One visit to the encoder store: a lookup of entries, with claims of the missing ones."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ec_store.base import Store
from ec_store.entry import EntryInfo
from ec_store.keys import EntryKey
from ec_store.opening import ProxyStore


@dataclass(slots=True, eq=False)
class Lookup:
    """A lookup of entries, and claims of the missing ones.

    Attributes:
        keys: keys of the entries.
        owner: owner of the claims; None for a lookup without claims.
        claim_s: lifetime of the claims in seconds.
        found: stored entries; None until the store has answered.
        claimed: missing keys that were claimed. A visit that is abandoned may still add some.
        settled: whether the store has answered the claims of all missing keys.
        skips_claims: whether the claims are skipped, because writing to the store fails.
        abandoned: whether the request waits no longer for the rest of the visit, which then
            releases at once the claims that it takes.
        claimed_before: keys that this proxy has claimed for other requests; a live view. The store
            renews these claims, and an abandoned visit does not release them.
    """

    keys: Sequence[EntryKey]
    owner: str | None = None
    claim_s: float = 0.0
    found: Mapping[EntryKey, EntryInfo] | None = None
    claimed: Sequence[EntryKey] = ()
    settled: bool = False
    skips_claims: bool = False
    abandoned: bool = False
    claimed_before: Collection[EntryKey] = ()

    def run(self, store: Store) -> None:
        """Look up the entries and claim the missing ones, which may block.

        Raises:
            StoreError: the store did not answer; `found` tells whether it answered the lookup.
            ValueError: as `Store.claim`.
        """
        self.found = _entries(store.lookup(self.keys))
        missing = [key for key in self.keys if key not in self.found]
        if self.owner is None or self.skips_claims or not missing or self.abandoned:
            return
        self._note_claims(missing, store.claim_or_find(missing, self.owner, self.claim_s))
        # Read after `claimed` is set: an abandoning request sets `abandoned` before it reads
        # `claimed`.
        if self.abandoned and (keys := self._own_claims()):
            store.release(keys, self.owner)

    async def ask(self, store: ProxyStore) -> None:
        """Look up the entries and claim the missing ones with one message.

        Raises:
            StoreError: the store did not answer.
        """
        if self.owner is None or self.skips_claims:
            self.found = _entries(await store.lookup(self.keys))
            return
        answers = await store.claim_or_find(self.keys, self.owner, self.claim_s)
        self._note_claims(self.keys, answers)
        if self.abandoned and (keys := self._own_claims()):
            await store.release(keys, self.owner)

    def _own_claims(self) -> list[EntryKey]:
        return [key for key in self.claimed if key not in self.claimed_before]

    def _note_claims(self, keys: Sequence[EntryKey], answers: Sequence[EntryInfo | bool]) -> None:
        self.found = {**(self.found or {}), **_entries(answers)}
        self.claimed = [key for key, answer in zip(keys, answers, strict=True) if answer is True]
        self.settled = len(self.found) < len(self.keys)


def _entries(answers: Sequence[EntryInfo | bool | None]) -> dict[EntryKey, EntryInfo]:
    return {answer.key: answer for answer in answers if isinstance(answer, EntryInfo)}
