"""Tiers behind an arena: stores that keep what the arena wrote, on this host or for several.

`TierChain` moves entries between the arena and its tiers; each tier has a `TierLink`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ec_store.concurrency import OPEN_S
from ec_store.counts import Counts
from ec_store.entry import Entry, EntryInfo
from ec_store.keys import EntryKey

MAX_LOOKUPS = 64
"""Upper bound of the look-ups in a tier at once; further ones skip it."""


@dataclass(slots=True)
class TierLimits:
    """Bounds of the transfers to and from each tier.

    Attributes:
        lookup_s: time in seconds that a client waits for the look-up in all tiers; then the entry
            is a miss. Half of the time that a proxy gives a look-up (`ec_store_budget_s`). A late
            look-up goes on in the background, and what it finds is fetched.
        max_keys: entries in one look-up; further ones are misses. More take too long.
        queue_bytes: bytes that wait to be sent to a tier, and those that are being fetched. One
            larger entry is let in if nothing else waits.
        queue_entries: entries that wait to be sent to a tier, and those that wait to be deleted.
        queued_s: time in seconds after which an entry that still waits is not sent.
        fetch_s: time in seconds after which an entry that has not come is a miss.
        touch_s: shortest time in seconds between two writes of a used entry to a tier of this host.
            The second one only counts as a use there, unless the tier has evicted it.
        skip_s: time in seconds for which a failing tier is skipped.
    """

    lookup_s: float = 0.01
    max_keys: int = 256
    queue_bytes: int = 512 * 2**20
    queue_entries: int = 4096
    queued_s: float = 30.0
    fetch_s: float = 30.0
    touch_s: float = 600.0
    skip_s: float = OPEN_S


@runtime_checkable
class Tier(Protocol):
    """Store behind an arena. Each method is called on threads, and has a deadline of its own.

    Every method may raise StoreUnavailable.

    Attributes:
        counts: its own counts, of which `corrupt` are entries that it has found corrupt.
    """

    counts: Counts

    def find(self, digests: Sequence[str]) -> list[EntryInfo | None]:
        """Return the fields of the headers of entries, by the digests of their keys."""

    def get(self, key: EntryKey) -> Entry | None:
        """Return an entry, verified; None if it is missing or corrupt."""

    def put(self, key: EntryKey, entry: Entry) -> bool:
        """Write an entry with a checksum of its bytes; False if it exists, which counts as a use.

        Raises:
            EntryTooLarge: it is larger than the tier accepts.
        """

    def remove(self, digests: Sequence[str]) -> int:
        """Delete entries by the digests of their keys, and return how many existed."""

    def purge(self, namespace: str) -> int:
        """Delete a namespace with its entries, and return how many existed."""

    def close(self) -> None: ...


@runtime_checkable
class SharedTier(Tier, Protocol):
    """Tier that several hosts share, with the claims of all of them."""

    def claim_missing(
        self, digests: Sequence[str], owner: bytes, seconds: float
    ) -> list[EntryInfo | bool]:
        """Claim keys for an owner, then look them up, by their digests.

        Returns:
            For each key the fields of its header if the entry exists, and otherwise whether the
            owner holds its claim now. Claims of existing entries are released. A tier without
            claims returns True for each missing entry.
        """

    def release_claims(self, digests: Sequence[str], owner: bytes) -> None:
        """Release claims of an owner; those of others stay."""
