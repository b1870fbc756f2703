"""One visit to the encoder store: a lookup of entries, with claims of the missing ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ec_store.base import Store
from ec_store.entry import EntryInfo
from ec_store.errors import StoreError
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
        problem: error of the claims, if any.
        skips_claims: whether the claims are skipped, because writing to the store fails.
        abandoned: whether the request waits no longer for the rest of the visit, which then
            releases at once all claims that it takes.
    """

    keys: Sequence[EntryKey]
    owner: str | None = None
    claim_s: float = 0.0
    found: Mapping[EntryKey, EntryInfo] | None = None
    claimed: Sequence[EntryKey] = ()
    settled: bool = False
    problem: Exception | None = None
    skips_claims: bool = False
    abandoned: bool = False

    def run(self, store: Store) -> None:
        """Look up the entries and claim the missing ones, which may block.

        Raises:
            StoreError: the store did not answer.
        """
        infos = store.lookup(self.keys)
        self.found = {info.key: info for info in infos if info is not None}
        missing = [key for key, info in zip(self.keys, infos, strict=True) if info is None]
        owner = self.owner
        if owner is None or self.skips_claims or not missing or self.abandoned:
            return
        try:
            claims = store.claim_or_find(missing, owner, self.claim_s)
            late = {info.key: info for info in claims if isinstance(info, EntryInfo)}
            self.found = {**self.found, **late}
            self.claimed = [
                key for key, claim in zip(missing, claims, strict=True) if claim is True
            ]
            self.settled = True
            # Read after `claimed` is set: an abandoning request sets `abandoned` before it reads
            # `claimed`.
            if self.abandoned and self.claimed:
                store.release(self.claimed, owner)
        except (StoreError, ValueError) as error:
            self.problem = error

    async def ask(self, store: ProxyStore) -> None:
        """Look up the entries and claim the missing ones with one message.

        Raises:
            StoreError: the store did not answer.
        """
        owner = None if self.skips_claims else self.owner
        answers = list[EntryInfo | bool | None]()
        if owner is None:
            answers += await store.lookup(self.keys)
        else:
            answers += await store.claim_or_find(self.keys, owner, self.claim_s)
        self.found = {info.key: info for info in answers if isinstance(info, EntryInfo)}
        if owner is not None:
            self.settled = len(self.found) < len(self.keys)
            self.claimed = [
                key for key, answer in zip(self.keys, answers, strict=True) if answer is True
            ]
            if self.abandoned and self.claimed:
                await store.release(self.claimed, owner)
