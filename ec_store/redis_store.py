"""Entries in Redis, or Redis Cluster, or what speaks its protocol (docs/redis.md)."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Self

from ec_store.base import LONGEST_CLAIM_S, Listed, Store, StoreStats
from ec_store.counts import Counts
from ec_store.entry import Entry, EntryInfo, encode_header
from ec_store.errors import CorruptEntry, EntryTooLarge, StoreUnavailable
from ec_store.keys import EntryKey, owner_bytes
from ec_store.redis_claims import RedisClaims
from ec_store.redis_client import OutOfMemory, RedisClient, Refused
from ec_store.redis_entries import STAGING_MS, PartMissing, RedisEntries, manifest_or_none
from ec_store.redis_layout import Frame, Manifest, Names
from ec_store.redis_scan import orphans, scanned
from ec_store.redis_url import RedisOptions, redis_options

PROBE_BYTES = 256 * 1024
"""A payload up to this is sent without asking whether the entry is there already."""

WRITES_OFF_S = 5.0
"""How long nothing is written after Redis has said that it is full."""

REFRESH_BELOW = 0.9
"""A read sets the time to live again when less than this part of it is left. So it is between 0.9
and 1 of `ttl` after the last use, for one more round trip in thousands."""

ATTEMPTS = 3
NO_KEY = -2


class RedisStore(Store):
    """Entries in Redis. Safe for threads, and over forks; connections are made when needed.

    Redis itself evicts and expires. A lease sets an entry's time to live to at least its seconds:
    that holds off expiry, but not eviction under `maxmemory`, from which Redis lets nothing be
    protected. Whoever leased an entry may find it gone, and must treat that as a miss.
    """

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._names = Names(options.prefix)
        self._client = RedisClient(options)
        self._entries = RedisEntries(self._client, self._names, options.chunk_bytes)
        self._claims = RedisClaims(self._client, self._names)
        self._ttl_ms = int(options.ttl_s * 1000)
        self._writes_off_until = 0.0
        self.counts = Counts()

    @classmethod
    def from_url(cls, url: str) -> Self:
        """A store from its URL; it is not reached for before the first call.

        Raises:
            ValueError: it is no such URL, or has an unknown or wrong parameter.
        """
        return cls(redis_options(url))

    def __repr__(self) -> str:
        return f"RedisStore({', '.join(map(str, self._options.addresses))})"

    def put(self, key: EntryKey, entry: Entry, *, replace: bool = False) -> bool:
        """Keep an entry (see `Store.put`). After "out of memory" nothing is written for 5 s."""
        header = encode_header(key, entry)
        size = len(header) + entry.data.nbytes
        if size > self._options.max_entry_bytes:
            raise EntryTooLarge(f"{size} bytes; the most is {self._options.max_entry_bytes}")
        try:
            with self._client.bounded():
                written = self._put(key, header, entry.data.cast("B"), replace=replace)
        except StoreUnavailable as error:
            if isinstance(error, OutOfMemory):
                self._writes_off_until = time.monotonic() + WRITES_OFF_S
            self.counts.add(drops=1)
            raise
        self.counts.add(puts=written)
        return written

    def get(self, key: EntryKey) -> Entry | None:
        """The entry (see `Store.get`). A server that is loading or failing over is a miss."""
        entry = None
        with suppress(Refused), self._client.bounded():
            entry = self._get(key)
        self.counts.add(misses=entry is None, hits=entry is not None)
        return entry

    def lookup(self, keys: Sequence[EntryKey]) -> list[EntryInfo | None]:
        """What the headers say (see `Store.lookup`).

        One round trip, and a second where a header is longer than `HEAD_BYTES`. Chunks are not
        looked at.
        """
        with self._client.bounded():
            manifests = self._entries.manifests([key.digest for key in keys])
        return [manifest.info if manifest else None for manifest in manifests]

    def lease(self, keys: Sequence[EntryKey], seconds: float) -> list[EntryInfo | None]:
        """As `lookup`, and what is there whole does not expire for `seconds`.

        It may be evicted all the same, see the class. Two round trips more than `lookup`.
        """
        with self._client.bounded():
            manifests = self._entries.manifests([key.digest for key in keys])
            left = self._client.run([("PTTL", self._names.manifest(key.digest)) for key in keys])
            wanted = max(self._ttl_ms, int(seconds * 1000))
            kept = self._entries.expire(
                [
                    (manifest, max(wanted, ms))
                    for manifest, ms in zip(manifests, left, strict=True)
                    if manifest
                ]
            )
            return [manifest.info if manifest and next(kept) else None for manifest in manifests]

    def claim(self, keys: Sequence[EntryKey], owner: str, seconds: float) -> list[bool]:
        """Say who makes entries (see `Store.claim`). One round trip, two where some are renewed."""
        digests = [key.digest for key in keys]
        return self._claims.take(digests, owner_bytes(owner), _claim_ms(seconds))

    def claim_or_find(
        self, keys: Sequence[EntryKey], owner: str, seconds: float
    ) -> list[EntryInfo | bool]:
        """Claim entries that are not there (see `Store.claim_or_find`). As many round trips."""
        digests = [key.digest for key in keys]
        with self._client.bounded():
            claims, heads = self._claims.take_and_ask(
                digests, owner_bytes(owner), _claim_ms(seconds), self._entries.look(digests)
            )
            manifests = self._entries.manifests(digests, heads)
        infos = [manifest.info if manifest else None for manifest in manifests]
        self.release(
            [
                key
                for key, info, held in zip(keys, infos, claims, strict=True)
                if held and info is not None
            ],
            owner,
        )
        return [info or held for info, held in zip(infos, claims, strict=True)]

    def release(self, keys: Sequence[EntryKey], owner: str) -> None:
        """Give back claims (see `Store.release`)."""
        self._claims.give_back([key.digest for key in keys], owner_bytes(owner))

    def delete(self, keys: Sequence[EntryKey]) -> int:
        """Forget entries; how many were there."""
        digests = list(dict.fromkeys(key.digest for key in keys))
        with self._client.bounded():
            heads = self._entries.heads(digests)
            return self._entries.forget(dict(zip(digests, heads, strict=True)))

    def purge(self, namespace: str) -> int:
        """Forget a namespace and its entries. Reads the headers of all entries of the store."""
        count = 0
        for heads in self._scanned_heads():
            count += self._entries.forget(
                {
                    digest: head
                    for digest, head in heads.items()
                    if (manifest := manifest_or_none(head, digest))
                    and manifest.info.key.namespace == namespace
                }
            )
        gone = [name for name, value in self.namespaces().items() if value == namespace]
        if gone:
            self._client.run([("HDEL", self._names.namespaces, *map(_encoded, gone))])
        return count

    def ls(self) -> Iterator[Listed]:
        """Every entry; Redis does not tell when one was used."""
        for heads in self._scanned_heads():
            sizes = self._client.run([("STRLEN", self._names.manifest(digest)) for digest in heads])
            for (digest, head), size in zip(heads.items(), sizes, strict=True):
                if not size:
                    continue
                try:
                    manifest = Manifest.read(memoryview(head), digest)
                except CorruptEntry as error:
                    yield Listed(digest, None, size, None, str(error))
                    continue
                chunked = manifest.info.payload_bytes if manifest.frame.chunk_bytes else 0
                yield Listed(digest, manifest.info, size + chunked, None)

    def verify(self, *, fix: bool = False) -> Iterator[Listed]:
        """Read every entry whole; the corrupt ones have a `problem`, and are deleted with `fix`."""
        for row in self.ls():
            problem = row.problem
            if row.info is not None:
                [value] = self._client.run([("GET", self._names.manifest(row.digest))])
                if value is None:
                    continue
                problem = self._problem(row.digest, value)
            if problem and fix:
                self._entries.forget({row.digest: self._entries.heads([row.digest])[0]})
            yield replace(row, problem=problem)

    def _problem(self, digest: str, value: bytes) -> str | None:
        try:
            self._entries.read(Manifest.read(memoryview(value), digest), value)
        except CorruptEntry as error:
            return str(error)
        return None

    def evict(self) -> int:
        """Remove chunks that no manifest names; 0, for they are no entries, and Redis evicts."""
        for names in orphans(self._client, self._names, STAGING_MS):
            self._client.run([("UNLINK", name) for name in names])
        return 0

    def stats(self) -> StoreStats:
        """Figures; the bytes are all that Redis uses, whoever does."""
        used = quota = 0
        unbounded = False
        for reply in self._client.masters(("INFO", "memory")):
            figures = dict(line.split(b":", 1) for line in reply.split(b"\r\n") if b":" in line)
            used += int(figures[b"used_memory"])
            quota += int(figures[b"maxmemory"])
            unbounded = unbounded or figures[b"maxmemory"] == b"0"
        return StoreStats(
            entries=None,
            bytes=used,
            max_bytes=None if unbounded else quota,
            hits=self.counts["hits"],
            misses=self.counts["misses"],
            puts=self.counts["puts"],
            drops=self.counts["drops"],
            corrupt=self.counts["corrupt"],
            evictions=0,
        )

    def register_namespace(self, model: str, namespace: str) -> None:
        """Say that entries of a served model are kept under a namespace; the last one counts."""
        pair = (_encoded(model), _encoded(namespace))
        self._client.run([("HSET", self._names.namespaces, *pair)])

    def namespaces(self) -> Mapping[str, str]:
        """The namespace of each served model that registered one."""
        reply = self._client.run([("HGETALL", self._names.namespaces)])[0]
        texts = [_decoded(part) for part in reply]
        return dict(zip(texts[::2], texts[1::2], strict=True))

    def close(self) -> None:
        """Let go of connections. Entries that were returned stay valid."""
        self._client.close()

    def _put(self, key: EntryKey, header: bytes, payload: memoryview, *, replace: bool) -> bool:
        if time.monotonic() < self._writes_off_until:
            raise StoreUnavailable("Redis was full a moment ago")
        if replace:
            return self._entries.write(key.digest, header, payload, self._ttl_ms, replace=True)
        ask_first = payload.nbytes > PROBE_BYTES
        for _ in range(ATTEMPTS):
            if ask_first and self._use(key.digest):
                return False
            if self._entries.write(key.digest, header, payload, self._ttl_ms):
                return True
            ask_first = True
        # Each time another writer's entry was there, and soon after it was not: deleted, evicted.
        return False

    def _use(self, digest: str) -> bool:
        """Whether the entry is there, whole. It counts as used; what is left of one is removed."""
        [head] = self._entries.heads([digest])
        [left] = self._client.run([("PTTL", self._names.manifest(digest))])
        if left == NO_KEY:
            return False
        manifest = manifest_or_none(head, digest)
        if manifest and next(self._entries.expire([(manifest, max(self._ttl_ms, left))])):
            return True
        self._entries.forget({digest: head})
        return False

    def _get(self, key: EntryKey) -> Entry | None:
        name = self._names.manifest(key.digest)
        for _ in range(ATTEMPTS):
            value, left = self._client.run([("GET", name), ("PTTL", name)])
            if value is None:
                return None
            try:
                return self._read(key.digest, value, left)
            except CorruptEntry as error:
                if self._replaced(key.digest, value):
                    continue
                self.counts.add(corrupt=not isinstance(error, PartMissing))
                with suppress(StoreUnavailable):
                    self._entries.forget({key.digest: value})
                return None
        return None

    def _read(self, digest: str, value: bytes, left_ms: int) -> Entry | None:
        """The entry, used; None where it is larger than this store takes."""
        manifest = Manifest.read(memoryview(value), digest)
        if manifest.info.size_bytes > self._options.max_entry_bytes:
            return None
        entry = self._entries.read(manifest, value)
        if left_ms < REFRESH_BELOW * self._ttl_ms:
            # A replica and a user who may only read serve reads all the same.
            with suppress(StoreUnavailable):
                self._entries.expire([(manifest, self._ttl_ms)])
        return entry

    def _replaced(self, digest: str, value: bytes) -> bool:
        """Whether an entry was written again while it was read."""
        with suppress(CorruptEntry):
            frame = self._entries.frame(digest)
            return frame is not None and frame != Frame.read(memoryview(value))
        return False

    def _scanned_heads(self) -> Iterator[dict[str, bytes]]:
        for digests in scanned(self._client, self._names):
            yield dict(zip(digests, self._entries.heads(digests), strict=True))


def _claim_ms(seconds: float) -> int:
    return max(1, int(min(seconds, LONGEST_CLAIM_S) * 1000))


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _decoded(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")
