"""Tier behind a host's memory in Mooncake Store.

An entry is two values:

    {prefix}-1-{format}/head/{digest}           its header, which a look-up reads
    {prefix}-1-{format}/{namespace}/{digest}    header and payload, which a read verifies

`{namespace}` is a digest. A look-up knows no namespace, and Mooncake lists no names: without the
first value nothing would be found, and without the namespace in the second none could be purged.
Mooncake evicts each by itself. One without the other is a miss, and a write removes it first. The 1
is the number of the layout, and `{format}` that of the entry's: processes of another layout or
format neither read nor remove these values.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Self, TypeVar

from ec_store import entry as entry_format
from ec_store.counts import Counts
from ec_store.entry import Entry, EntryInfo, checksum, decode, encode_header, read_header
from ec_store.errors import CorruptEntry, EntryTooLarge, OtherFormat, StoreUnavailable
from ec_store.keys import EntryKey, digest_of
from ec_store.mooncake.client import MISSES, Lane, MooncakeClient, Status
from ec_store.mooncake.program import Program
from ec_store.mooncake.url import MooncakeOptions, mooncake_options
from ec_store.redis.store import RedisStore

logger = logging.getLogger("vllm.ec_store")

HEAD_BYTES = 4096
"""Largest header in bytes; an entry with a longer one is too large for this tier."""

BATCH = 256
"""Keys in one call of the library. Their heads fit into the memory of a lane."""

T = TypeVar("T")


class MooncakeTier:
    """Entries in the memory of many hosts. Thread-safe.

    Mooncake evicts by least use, and protects what was looked up or read for the lease time of its
    master (`--default_kv_lease_ttl`). Claims are in Redis, if the URL names one.

    Attributes:
        counts: `hits`, `misses`, `puts`, `drops` and `corrupt`, as of every store.
    """

    def __init__(self, options: MooncakeOptions, claims: RedisStore | None = None) -> None:
        """Start the processes of Mooncake's library in the background.

        Args:
            options: options of the tier.
            claims: store that has the claims, which `close` closes; None without claims.
        """
        self._options = options
        self._claims = claims
        self._names = _Names(f"{options.prefix}-1-{entry_format.FORMAT.rpartition('/')[2]}")
        self.client = MooncakeClient(options)
        self.segment: Program | None = None
        if options.segment_bytes:
            # A process of its own: the entries in it stay when the client is replaced.
            self.segment = Program(
                "Mooncake's segment", options, segment_bytes=options.segment_bytes, memories=()
            )
        self.counts = Counts()

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Create a tier from its URL; the errors are those of `mooncake_options`."""
        options = mooncake_options(url)
        return cls(options, RedisStore.from_url(options.claims) if options.claims else None)

    def __repr__(self) -> str:
        return f"MooncakeTier({self._options.master})"

    def find(self, digests: Sequence[str]) -> list[EntryInfo | None]:
        """Look up entries (see `Tier.find`).

        It reads all heads at once, and asks the master once whether the values exist. That protects
        them for the lease time. Values are not verified.
        """
        return [info for batch in _batches(digests) for info in self._find(batch)]

    def _find(self, digests: Sequence[str]) -> list[EntryInfo | None]:
        with self.client.lane() as lane:
            infos = self._heads(lane, digests)
            keys = [info.key for info in infos if info]
            values = [self._names.value(key) for key in keys]
            existing = set(_where(keys, lane.exist(values))) if keys else set()
        return [info if info and info.key in existing else None for info in infos]

    def get(self, key: EntryKey) -> Entry | None:
        """Read an entry into memory of a lane (see `Tier.get`); its bytes are a view of it.

        A corrupt one is removed.
        """
        entry = self._get(key)
        self.counts.add(hits=entry is not None, misses=entry is None)
        return entry

    def _get(self, key: EntryKey) -> Entry | None:
        name = self._names.value(key)
        with self.client.lane() as lane:
            size = lane.read(name)
            if size in MISSES:
                return None
            if size < 0:
                raise StoreUnavailable(f"an entry could not be read from Mooncake: error {size}")
            try:
                return decode(key, memoryview(lane.memory)[:size])
            except OtherFormat:
                return None
            except CorruptEntry as error:
                if not lane.exist([name])[0]:  # it was evicted during the read
                    return None
                self._count_corrupt(key.digest, error)
                lane.remove([name, self._names.head(key.digest)])
                return None

    def put(self, key: EntryKey, entry: Entry) -> bool:
        """Write an entry (see `Tier.put`). Its bytes are copied once, to memory of a lane."""
        header = encode_header(key, entry, checksum(entry.data))
        size = len(header) + entry.data.nbytes
        if len(header) > HEAD_BYTES or size > self._options.max_entry_bytes:
            raise EntryTooLarge(
                f"it has {size} bytes, {len(header)} of them in its header; the limits are "
                f"{self._options.max_entry_bytes} and {HEAD_BYTES}"
            )
        names = [self._names.value(key), self._names.head(key.digest)]
        try:
            with self.client.lane() as lane:
                existing = list(_where(names, lane.exist(names)))
                if existing == names:
                    return False
                if existing:
                    lane.remove(existing)
                lane.memory[: len(header)] = header
                lane.memory[len(header) : size] = entry.data.cast("B")
                self._write(lane, names, [size, len(header)])
        except StoreUnavailable:
            self.counts.add(drops=1)
            raise
        self.counts.add(puts=1)
        return True

    def _write(self, lane: Lane, names: Sequence[str], sizes: Sequence[int]) -> None:
        """Write both values or none."""
        statuses = lane.put(names, sizes)
        failed = min(statuses)
        if failed == 0:
            return
        lane.remove(list(_where(names, [status == 0 for status in statuses])))
        if failed == Status.FULL:
            raise StoreUnavailable("Mooncake has no room for an entry")
        raise StoreUnavailable(f"an entry could not be written to Mooncake: error {failed}")

    def remove(self, digests: Sequence[str]) -> int:
        """Delete entries (see `Tier.remove`), leased or not."""
        return sum(map(self._remove, _batches(list(dict.fromkeys(digests)))))

    def _remove(self, digests: Sequence[str]) -> int:
        with self.client.lane() as lane:
            infos = self._heads(lane, digests)
            values = [self._names.value(info.key) for info in infos if info]
            removed = lane.remove(values) if values else []
            lane.remove([self._names.head(digest) for digest in digests])
        return sum(removed)

    def purge(self, namespace: str) -> int:
        """Delete a namespace (see `Tier.purge`).

        The master compares the names of all values, in one call. The heads stay as misses until
        they are evicted.
        """
        with self.client.lane() as lane:
            return lane.remove_matching(self._names.pattern(namespace))

    def claim_missing(
        self, digests: Sequence[str], owner: bytes, seconds: float
    ) -> list[EntryInfo | bool]:
        """Claim missing entries (see `SharedTier.claim_missing`), in Redis if the URL names one."""
        if self._claims is None:
            return [info or True for info in self.find(digests)]
        claims = self._claims.claim_missing(digests, owner, seconds)
        infos = self.find(digests)
        found = zip(digests, infos, claims, strict=True)
        needless = [digest for digest, info, claimed in found if info and claimed]
        if needless:
            self._claims.release_claims(needless, owner)
        return [info or bool(claimed) for info, claimed in zip(infos, claims, strict=True)]

    def release_claims(self, digests: Sequence[str], owner: bytes) -> None:
        if self._claims is not None:
            self._claims.release_claims(digests, owner)

    def close(self) -> None:
        """End the processes; the segment of this host and its entries leave Mooncake."""
        self.client.close()
        if self.segment is not None:
            self.segment.close()
        if self._claims is not None:
            self._claims.close()

    def _heads(self, lane: Lane, digests: Sequence[str]) -> list[EntryInfo | None]:
        """Read headers; one that cannot be read is a miss."""
        sizes = lane.get([self._names.head(digest) for digest in digests], HEAD_BYTES)
        starts = range(0, len(sizes) * HEAD_BYTES, HEAD_BYTES)
        return [
            self._head(digest, lane.memory[start : start + size]) if size >= 0 else None
            for digest, start, size in zip(digests, starts, sizes, strict=True)
        ]

    def _head(self, digest: str, raw: bytes) -> EntryInfo | None:
        try:
            return read_header(raw, digest)
        except OtherFormat:
            return None
        except CorruptEntry as error:
            self._count_corrupt(digest, error)
            return None

    def _count_corrupt(self, digest: str, error: CorruptEntry) -> None:
        self.counts.add(corrupt=1)
        logger.warning("an entry in Mooncake is corrupt and a miss: %s: %s", digest, error)


class _Names:
    """Names of the values of one store."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def head(self, digest: str) -> str:
        return f"{self._prefix}/head/{digest}"

    def value(self, key: EntryKey) -> str:
        return f"{self._prefix}/{_namespace(key.namespace)}/{key.digest}"

    def pattern(self, namespace: str) -> str:
        """Return the regular expression of the values of a namespace."""
        return f"^{self._prefix}/{_namespace(namespace)}/.*"


def _namespace(name: str) -> str:
    return digest_of(name).hex()


def _batches(digests: Sequence[str]) -> Iterator[Sequence[str]]:
    return (digests[start : start + BATCH] for start in range(0, len(digests), BATCH))


def _where(values: Sequence[T], chosen: Sequence[bool]) -> Iterator[T]:
    return (value for value, each in zip(values, chosen, strict=True) if each)
