"""Interface of every store."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from ec_store.counts import Counts
from ec_store.entry import Entry, EntryInfo
from ec_store.keys import EntryKey

LONGEST_S = 3600.0
"""Upper bound in seconds of leases and claims, both when they are written and when they are read.
"""


@dataclass(frozen=True, slots=True)
class ClientUse:
    """Memory that the connections of one process hold.

    Attributes:
        pid: its PID as the server sees it; 0 if it is in a PID namespace that the server does not
            see.
        role: `proxy`, `reader` or `writer`.
    """

    pid: int
    role: str
    pinned_bytes: int
    begun_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Metrics of the memory of a host.

    Attributes:
        pages: kind of its pages, as `pages of 4 KiB`.
        clients: number of connections.
        pinned_bytes: bytes that readers protect from eviction.
        leased_bytes: bytes that leases protect from it.
        begun_bytes: bytes that are being written.
        gone_bytes: bytes that clients had pinned or begun which have lost their connection.
        oldest_pin_s: age of the oldest pin in seconds; 0 without pins.
        refused: writes that found no room, because all entries were in use.
        uses: processes that have pinned or begun anything.
        saved_s: encode seconds of the entries that were read, as far as their producers have
            measured them. The first read of an entry does not count.
        evicts_by: order in which entries are evicted now, `worth` or `least use`.
    """

    pages: str
    clients: int
    pinned_bytes: int
    leased_bytes: int
    begun_bytes: int
    gone_bytes: int
    oldest_pin_s: float
    refused: int
    uses: Sequence[ClientUse]
    saved_s: float = 0.0
    evicts_by: str = ""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Metrics of a store; a value that a backend cannot compute cheaply is None.

    Attributes:
        entries: number of entries; None in Redis, which would have to scan its keys.
        bytes: bytes that the entries take, headers included; in Redis all memory of the server.
        max_bytes: effective quota in bytes; None if Redis has no `maxmemory`.
        leased: number of entries that leases protect from eviction now; None in Redis.
        hits, misses: results of `get` in this process.
        puts: entries written by this process.
        drops: entries this process could not write, because the store was full or unreachable.
        corrupt: corrupt entries that this process found and moved aside.
        evictions: entries evicted by this process, or by the server of a memory.
        memory: metrics that only the memory of a host has.
        tiers: numbers (`ec_store.arena.protocol.TierStats`) of the tiers behind a host's memory, by
            the schemes of their URLs.
    """

    entries: int | None
    bytes: int | None
    max_bytes: int | None
    leased: int | None
    hits: int
    misses: int
    puts: int
    drops: int
    corrupt: int
    evictions: int
    tiers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    memory: MemoryStats | None = None


@dataclass(frozen=True, slots=True)
class Listed:
    """One row of a listing.

    Attributes:
        digest: digest of the key; the entry's name in the store.
        info: fields of the entry's header; None if the entry is corrupt or in another format.
        size_bytes: size of the entry in the store.
        used_s: time of last use by the store's clock, seconds since the epoch; None if the backend
            does not record it, as Redis does not.
        problem: reason why the entry is corrupt, or None.
        skipped: reason why this release cannot read an entry of another format, or None.
    """

    digest: str
    info: EntryInfo | None
    size_bytes: int
    used_s: float | None
    problem: str | None = None
    skipped: str | None = None


def process_counts(counts: Counts) -> dict[str, Any]:
    """Return a store's counts that are fields of its statistics."""
    names = ("hits", "misses", "puts", "drops", "corrupt", "evictions")
    return {name: counts[name] for name in names}


class Store(ABC):
    """A shared store of entries, safe for many threads and many processes at once.

    A missing, expired, torn, corrupt or foreign entry is a miss, and so is one in a directory that
    cannot be read. Every method may raise `StoreUnavailable`, when the store cannot be reached. All
    other errors are listed with the method.

    Attributes:
        counts: events in this process: `hits`, `misses`, `puts`, `drops`, `corrupt`. If this
            process evicts, also `evictions`, and `eviction_seconds` observes each eviction that had
            to free room.
    """

    counts: Counts

    @abstractmethod
    def put(self, key: EntryKey, entry: Entry, *, replace: bool = False) -> bool:
        """Write an entry. It appears whole or not at all; of two writers either may win.

        `replace` overwrites an existing entry; readers see the old or the new one. An entry of
        another format, which this release cannot read, is always overwritten; in a directory,
        not while it is leased.

        Returns:
            False if an entry of this key exists: it stays, and this call counts as a use of it.

        Raises:
            EntryTooLarge: the entry is larger than the store accepts.
            StoreUnavailable: the store is full, read-only or unreachable.
        """

    @abstractmethod
    def get(self, key: EntryKey) -> Entry | None:
        """Return the entry, verified, or None. Counts as a use.

        The bytes stay valid while the entry is referenced, whatever happens to the store.
        """

    @abstractmethod
    def lookup(self, keys: Sequence[EntryKey]) -> list[EntryInfo | None]:
        """Return the headers' fields in the order of the keys, in one round trip, without tensors.

        A miss is None. A hit is no guarantee: without a lease the entry may be evicted at any
        moment. Headers are verified, payloads are not.
        """

    @abstractmethod
    def lease(self, keys: Sequence[EntryKey], seconds: float) -> list[EntryInfo | None]:
        """Look up entries and protect them from eviction for `seconds`. Counts as a use."""

    @abstractmethod
    def claim(self, keys: Sequence[EntryKey], owner: str, seconds: float) -> list[bool]:
        """Claim the right to produce entries, so that other owners do not repeat the work.

        A free claim is taken, and a claim of this owner is renewed. A claim expires after `seconds`
        by the store's clock, at most after `LONGEST_S`: a crashed owner blocks the others no
        longer than that. A claim is independent of the entry: the entry may exist or not, and any
        process may put it. In rare races two owners hold one claim for a time. Claims save work;
        correctness must not depend on them.

        An owner is a name shared by callers that produce an entry once between them, and different
        from all others'. A claim that another process is changing at the moment may not be taken.

        Returns:
            For each key whether the owner holds its claim now; False if another owner does.

        Raises:
            StoreUnavailable: claims cannot be written. Callers go on without; existing claims
                expire.
            ValueError: the owner is empty, or longer than `MAX_OWNER_BYTES` bytes.
        """

    def claim_or_find(
        self, keys: Sequence[EntryKey], owner: str, seconds: float
    ) -> list[EntryInfo | bool]:
        """Claim entries, then look them up: an existing entry needs no producer.

        A lookup before the claim would miss an entry that is written between the two, by an owner
        that has released its claim since.

        Returns:
            For each key the fields of its header if the entry exists, and otherwise whether the
            owner holds its claim now. Claims of existing entries are released.

        Raises:
            StoreUnavailable: as `claim` and `lookup`.
            ValueError: as `claim`.
        """
        claims = self.claim(keys, owner, seconds)
        infos = self.lookup(keys)
        needless = [
            key for key, claimed, info in zip(keys, claims, infos, strict=True) if claimed and info
        ]
        if needless:
            self.release(needless, owner)
        return [info or claimed for info, claimed in zip(infos, claims, strict=True)]

    @abstractmethod
    def release(self, keys: Sequence[EntryKey], owner: str) -> None:
        """Release claims before they expire. Claims of other owners stay.

        Raises:
            StoreUnavailable: claims cannot be written. They still expire.
            ValueError: as `claim`.
        """

    @abstractmethod
    def delete(self, keys: Sequence[EntryKey]) -> int:
        """Delete entries, leased or not, and return how many existed."""

    @abstractmethod
    def purge(self, namespace: str) -> int:
        """Delete a namespace with all its entries, and return the number of entries."""

    @abstractmethod
    def ls(self) -> Iterator[Listed]:
        """Yield every entry, in no order. Entries may come and go meanwhile."""

    @abstractmethod
    def verify(self, *, fix: bool = False) -> Iterator[Listed]:
        """Read every entry whole; corrupt ones have a `problem`, and `fix` deletes them.

        Entries of another format are `skipped` and stay: during an upgrade another release reads
        them.
        """

    def sweep(self, every_s: float = 0.0) -> int:  # noqa: ARG002 - for backends that need it
        """Bring the store under its quota, and remove expired entries and files that crashes left.

        This may read the metadata of every entry. If any process has started a sweep less than
        `every_s` seconds ago, it only evicts, at a cost that depends on the bytes to free.

        Returns:
            Number of removed entries; 0 if the backend evicts by itself.
        """
        return 0

    @abstractmethod
    def stats(self) -> StoreStats: ...

    @abstractmethod
    def register_namespace(self, model: str, namespace: str) -> None:
        """Record the namespace of a served model's entries; the last registration counts."""

    @abstractmethod
    def namespaces(self) -> Mapping[str, str]:
        """Return the registered namespace of each served model."""

    def check(self) -> None:  # noqa: B027 - Redis needs no such step
        """Open the directory of a store that was opened lazily.

        Raises:
            StoreMissing: the directory is missing, and this store does not create it.
            StoreUnavailable: the directory cannot be created, written or read.
        """

    @abstractmethod
    def close(self) -> None:
        """Close connections and files. Entries that were returned stay valid."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
