"""What every store can do."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from ec_store.counts import Counts
from ec_store.entry import Entry, EntryInfo
from ec_store.keys import EntryKey

LONGEST_CLAIM_S = 3600.0
"""No claim lives longer without being renewed, whatever is asked for or found."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Figures of a store; what a backend cannot know cheaply is None.

    Attributes:
        entries: how many there are; None in Redis, which would have to go through its keys.
        bytes: what they take, headers included; in Redis all that the server uses.
        max_bytes: the quota that is in force; None where Redis has no `maxmemory`.
        hits, misses: of `get` in this process.
        puts: entries written by this process.
        drops: entries this process could not write, because the store was full or away.
        corrupt: entries this process found corrupt and put aside.
        evictions: entries this process evicted.
    """

    entries: int | None
    bytes: int | None
    max_bytes: int | None
    hits: int
    misses: int
    puts: int
    drops: int
    corrupt: int
    evictions: int


@dataclass(frozen=True, slots=True)
class Listed:
    """One row of a listing.

    Attributes:
        digest: the key's digest, under which the entry is kept.
        info: what its header says; None where it is corrupt.
        size_bytes: what it takes.
        used_s: when it was last used, seconds since the epoch by the store's clock; None where the
            backend does not know, as Redis does not.
        problem: why it is corrupt, or None.
    """

    digest: str
    info: EntryInfo | None
    size_bytes: int
    used_s: float | None
    problem: str | None = None


class Store(Protocol):
    """Keeps entries. Safe to use from many threads, and from many processes on one store.

    A missing, expired, torn, corrupt or foreign entry is a miss. Only what is said here is raised:
    `StoreUnavailable` by every method where the store cannot be reached.

    Attributes:
        counts: what happened in this process: `hits`, `misses`, `puts`, `drops`, `corrupt`. Where
            this process evicts, it observes `eviction_seconds`, of each time that room was needed.
    """

    counts: Counts

    @property
    def in_memory(self) -> bool:
        """Whether it is kept in this machine's memory: a look-up waits for no device or server."""
        return False

    def put(self, key: EntryKey, entry: Entry, *, replace: bool = False) -> bool:
        """Keep an entry. It appears whole or not at all; of two writers either may win.

        Args:
            key: its key.
            entry: the entry.
            replace: put it in the place of one that is there; readers see the one or the other.

        Returns:
            False where an entry of this key was there already: it is kept, and counts as used.

        Raises:
            EntryTooLarge: it is larger than the store takes.
            StoreUnavailable: it could not be written: full, read-only, away.
        """

    def get(self, key: EntryKey) -> Entry | None:
        """The entry, verified, or None. Counts as use.

        The bytes stay valid for as long as the entry is referenced, whatever happens to the store.
        """

    def lookup(self, keys: Sequence[EntryKey]) -> list[EntryInfo | None]:
        """What the headers say, in the order of the keys, in one round trip and without tensors.

        An answer is no promise: without a lease the entry may be gone a moment later. Headers are
        verified, payloads are not.
        """

    def lease(self, keys: Sequence[EntryKey], seconds: float) -> list[EntryInfo | None]:
        """As `lookup`, and what is there is not evicted for `seconds` from now. Counts as use."""

    def claim(
        self, keys: Sequence[EntryKey], owner: str, seconds: float, *, wait: bool = True
    ) -> list[bool]:
        """Say that `owner` makes these entries, so that others may wait instead of making them too.

        A claim is taken where nobody holds it, and renewed where this owner does. It ends `seconds`
        later by the store's clock, after an hour at most: it dies with its holder. It says nothing
        of the entry, which may be there or not, and keeps nobody from putting it. In rare races
        two owners hold one claim for a time: it saves work, and nothing may depend on it.

        Args:
            keys: the entries.
            owner: the same for those who make an entry once between them, and nobody else's.
            seconds: how long from now, unless it is renewed.
            wait: whether the call may wait, for a second at most, while other processes change one
                of these claims. Without it such a claim is not taken.

        Returns:
            For each key whether the owner holds its claim now; False where another does.

        Raises:
            StoreUnavailable: claims cannot be written. Go on without: what was taken before ends.
            ValueError: the owner is empty, or longer than `MAX_OWNER_BYTES` bytes.
        """

    def claim_or_find(
        self, keys: Sequence[EntryKey], owner: str, seconds: float
    ) -> list[EntryInfo | bool]:
        """As `claim`, and then `lookup`: what is there by then need not be made.

        Who looks before a claim alone does not see what was written in between, by a holder that
        has given its claim back.

        Returns:
            For each key what its header says; where there is no entry, whether the owner holds its
            claim now. Claims to what is there are given back.

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

    def release(self, keys: Sequence[EntryKey], owner: str) -> None:
        """Give back claims before they end. What another holds is left alone.

        Raises:
            StoreUnavailable: claims cannot be written. They end all the same.
            ValueError: as `claim`.
        """

    def delete(self, keys: Sequence[EntryKey]) -> int:
        """Forget entries, leased or not; how many were there."""

    def purge(self, namespace: str) -> int:
        """Forget all entries of a namespace, and the namespace; how many entries there were."""

    def ls(self) -> Iterator[Listed]:
        """Every entry, in no order. Entries may come and go meanwhile."""

    def verify(self, *, fix: bool = False) -> Iterator[Listed]:
        """Read every entry whole; the corrupt ones have a `problem`, and are deleted with `fix`."""

    def evict(self) -> int:
        """Bring the store under its quota. What this costs depends on what has to go.

        Returns:
            How many entries were removed. 0 where the backend does this by itself.
        """

    def sweep(self, every_s: float = 0.0) -> int:  # noqa: ARG002 - for backends that need it
        """As `evict`, and remove all that has expired or was left by a crash.

        This may look at every entry.

        Args:
            every_s: do nothing but `evict` where any process began a sweep so lately.

        Returns:
            How many entries were removed. 0 where the backend does this by itself.
        """
        return self.evict()

    def stats(self) -> StoreStats:
        """Figures."""

    def register_namespace(self, model: str, namespace: str) -> None:
        """Say that entries of a served model are kept under a namespace; the last one counts."""

    def namespaces(self) -> Mapping[str, str]:
        """The namespace of each served model that registered one."""

    def check(self) -> None:
        """Open the directory of a store that was opened lazily; a server has nothing to open.

        Raises:
            StoreMissing: it is not there, and is not made.
            StoreUnavailable: it cannot be made, written to or read from.
        """

    def close(self) -> None:
        """Let go of connections and files. Entries that were returned stay valid."""

    def __enter__(self) -> Self:
        """The store itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()
