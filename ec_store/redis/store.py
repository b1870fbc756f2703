"""Store in Redis, Redis Cluster, or a compatible server (docs/redis.md), and its claims.

A claim is taken with `SET NX PX`, with the owner as value. No script compares and renews, or
compares and removes, atomically: the Redis user would need the right to run any script. If a claim
expires between the two commands and another owner takes it, the second command renews or removes
that owner's claim. At worst an entry is encoded twice, and a claim of a dead holder lives for twice
its time.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Self

from ec_store.base import LONGEST_S, Listed, Store, StoreStats, process_counts
from ec_store.counts import Counts
from ec_store.entry import Entry, EntryInfo, checksum, encode_header, read_header
from ec_store.errors import CorruptEntry, EntryTooLarge, OtherFormat, StoreUnavailable
from ec_store.keys import EntryKey, decode_name, encode_name, owner_bytes
from ec_store.redis.client import OutOfMemory, RedisClient, Refused
from ec_store.redis.connection import Command, Reply
from ec_store.redis.entries import WINDOW_BYTES, Beginning, RedisEntries, info_or_none
from ec_store.redis.names import RedisNames
from ec_store.redis.url import RedisOptions, redis_options
from ec_store.redis.write_permits import WritePermits

WRITES_OFF_S = 5.0
"""Seconds without writes after Redis has reported that it is out of memory."""

ATTEMPTS = 3
"""Attempts to read an entry that is replaced during the read."""


class RedisStore(Store):
    """Store of entries in Redis. Thread-safe, also after forks; it connects at the first use.

    Redis itself evicts and expires entries. A lease sets an entry's time to live to at least its
    seconds. That prevents expiry, but not eviction under `maxmemory`, from which Redis cannot
    protect a key. So a leased entry may be gone, and callers must treat that as a miss.
    """

    def __init__(self, options: RedisOptions, *, window_bytes: int = WINDOW_BYTES) -> None:
        """Create the store; a read of a large entry is cut into windows of `window_bytes`."""
        self._options = options
        self._names = RedisNames(options.prefix)
        self._client = RedisClient(options)
        ttl_ms = int(options.ttl_s * 1000)
        self._entries = RedisEntries(self._client, self._names, ttl_ms, window_bytes)
        self._permits = WritePermits(self._client, options.prefix, options.timeout_s)
        self._writes_off_until = 0.0
        self.counts = Counts()

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Create a store from its URL; the errors are those of `redis_options`."""
        return cls(redis_options(url))

    def __repr__(self) -> str:
        return f"RedisStore({', '.join(map(str, self._options.addresses))})"

    def put(self, key: EntryKey, entry: Entry, *, replace: bool = False) -> bool:
        """Write an entry (see `Store.put`). After an "out of memory" no write is sent for 5 s.

        One round trip, which sends the tensor even if the entry exists. A large entry needs two
        more, and waits for its permit. A caller that can skip making the entry calls `lease` first,
        as the connector does.
        """
        header = encode_header(key, entry, checksum(entry.data))
        size = len(header) + entry.data.nbytes
        if size > self._options.max_entry_bytes:
            raise EntryTooLarge(
                f"it has {size} bytes; the limit is {self._options.max_entry_bytes}"
            )
        try:
            with self._client.limit_time():
                written = self._put(key, header, entry.data.cast("B"), replace=replace)
        except StoreUnavailable as error:
            if isinstance(error, OutOfMemory):
                self._writes_off_until = time.monotonic() + WRITES_OFF_S
            self.counts.add(drops=1)
            raise
        self.counts.add(puts=written)
        return written

    def get(self, key: EntryKey) -> Entry | None:
        """Return an entry (see `Store.get`). A server that is loading or failing over is a miss."""
        entry = None
        with suppress(Refused), self._client.limit_time():
            entry = self._get(key)
        self.counts.add(misses=entry is None, hits=entry is not None)
        return entry

    def lookup(self, keys: Sequence[EntryKey]) -> list[EntryInfo | None]:
        """Look up headers (see `Store.lookup`).

        One round trip, and a second one if a header is longer than `HEAD_BYTES`.
        """
        return self.find([key.digest for key in keys])

    def find(self, digests: Sequence[str]) -> list[EntryInfo | None]:
        """Look up headers as `lookup`, by the digests of their keys."""
        with self._client.limit_time():
            replies = self._client.run(self._entries.info_commands(digests))
            return self._entries.parse_infos(digests, replies)

    def lease(self, keys: Sequence[EntryKey], seconds: float) -> list[EntryInfo | None]:
        """Look up entries and prevent their expiry for `seconds`.

        Redis may still evict them, see the class. One round trip, and a second one if the time to
        live of an entry has to be set.
        """
        with self._client.limit_time():
            return self._entries.use_entries([key.digest for key in keys], seconds)

    def claim(self, keys: Sequence[EntryKey], owner: str, seconds: float) -> list[bool]:
        """Claim entries (see `Store.claim`). One round trip, two if some claims are renewed."""
        digests = [key.digest for key in keys]
        return self._claim_and_ask(digests, owner_bytes(owner), seconds, ())[0]

    def claim_or_find(
        self, keys: Sequence[EntryKey], owner: str, seconds: float
    ) -> list[EntryInfo | bool]:
        """Claim missing entries (see `Store.claim_or_find`), in as many round trips as `claim`."""
        return self.claim_missing([key.digest for key in keys], owner_bytes(owner), seconds)

    def claim_missing(
        self, digests: Sequence[str], owner: bytes, seconds: float
    ) -> list[EntryInfo | bool]:
        """Claim missing entries as `claim_or_find`, by the digests of their keys."""
        with self._client.limit_time():
            claims, heads = self._claim_and_ask(
                digests, owner, seconds, self._entries.info_commands(digests)
            )
            infos = self._entries.parse_infos(digests, heads)
        found = zip(digests, infos, claims, strict=True)
        self.release_claims([digest for digest, info, claimed in found if info and claimed], owner)
        return [info or claimed for info, claimed in zip(infos, claims, strict=True)]

    def release(self, keys: Sequence[EntryKey], owner: str) -> None:
        """Release claims (see `Store.release`), in two round trips."""
        self.release_claims([key.digest for key in keys], owner_bytes(owner))

    def release_claims(self, digests: Sequence[str], owner: bytes) -> None:
        """Release claims as `release`, by the digests of their keys."""
        names = [self._names.claim(digest) for digest in digests]
        holders = self._client.run([("GET", name) for name in names])
        found = zip(names, holders, strict=True)
        self._client.run([("UNLINK", name) for name, holder in found if holder == owner])

    def delete(self, keys: Sequence[EntryKey]) -> int:
        return self.remove(list(dict.fromkeys(key.digest for key in keys)))

    def remove(self, digests: Sequence[str]) -> int:
        """Delete entries as `delete`, by the digests of their keys, each once."""
        with self._client.limit_time():
            return self._entries.remove_entries(digests)

    def purge(self, namespace: str) -> int:
        """Delete a namespace and its entries. Reads the headers of all entries of the store."""
        count = 0
        for heads in self._entries.scan():
            infos = [info_or_none(digest, head) for digest, head in heads.items()]
            count += self._entries.remove_entries(
                [info.key.digest for info in infos if info and info.key.namespace == namespace]
            )
        gone = [name for name, value in self.namespaces().items() if value == namespace]
        if gone:
            self._client.run([("HDEL", self._names.namespaces, *map(encode_name, gone))])
        return count

    def ls(self) -> Iterator[Listed]:
        """Yield every entry; Redis does not report when one was used."""
        for heads in self._entries.scan():
            sizes = self._entries.sizes(list(heads))
            for (digest, head), size in zip(heads.items(), sizes, strict=True):
                if size:
                    yield _listed(digest, head, size)

    def verify(self, *, fix: bool = False) -> Iterator[Listed]:
        for row in self.ls():
            problem = row.problem
            if row.info and not problem:
                problem = self._problem(row.info.key)
            if problem and fix:
                self._entries.remove_entries([row.digest])
            yield replace(row, problem=problem)

    def _problem(self, key: EntryKey) -> str | None:
        beginning = self._entries.read_beginning(key.digest)
        if beginning is None:
            return None
        try:
            self._entries.read(key, beginning)
        except CorruptEntry as error:
            return str(error) if self._entries.is_still(key.digest, beginning) else None
        return None

    def stats(self) -> StoreStats:
        """Return metrics; the bytes are all memory that Redis uses, for any purpose."""
        servers = [
            dict(line.split(b":", 1) for line in reply.split(b"\r\n") if b":" in line)
            for _, reply in self._client.each_master(("INFO", "memory"))
        ]
        quotas = [int(server[b"maxmemory"]) for server in servers]  # 0 for none
        return StoreStats(
            entries=None,
            bytes=sum(int(server[b"used_memory"]) for server in servers),
            max_bytes=sum(quotas) if all(quotas) else None,
            leased=None,
            **process_counts(self.counts),
        )

    def register_namespace(self, model: str, namespace: str) -> None:
        pair = (encode_name(model), encode_name(namespace))
        self._client.run([("HSET", self._names.namespaces, *pair)])

    def namespaces(self) -> Mapping[str, str]:
        reply = self._client.run([("HGETALL", self._names.namespaces)])[0]
        texts = [decode_name(part) for part in reply]
        return dict(zip(texts[::2], texts[1::2], strict=True))

    def close(self) -> None:
        self._client.close()

    def _put(self, key: EntryKey, header: bytes, payload: memoryview, *, replace: bool) -> bool:
        if time.monotonic() < self._writes_off_until:
            raise StoreUnavailable("Redis was out of memory a moment ago, so the entry is dropped")
        with self._permits.hold_permit(payload.nbytes):
            return self._entries.write(key.digest, header, payload, replace=replace)

    def _claim_and_ask(
        self, digests: Sequence[str], owner: bytes, seconds: float, then: Sequence[Command]
    ) -> tuple[list[bool], list[Reply]]:
        """Claim entries as `claim`, and return the replies to `then`, of the same round trip."""
        names = [self._names.claim(digest) for digest in digests]
        ms = max(1, int(min(seconds, LONGEST_S) * 1000))
        claims: list[Command] = [
            command
            for name in names
            for command in (("SET", name, owner, "NX", "PX", ms), ("GET", name))
        ]
        replies = self._client.run([*claims, *then])
        taken, holders = replies[: len(claims) : 2], replies[1 : len(claims) : 2]
        # A PEXPIRE in the same round trip would renew another owner's claim with each call.
        renewable = [
            name
            for name, is_new, holder in zip(names, taken, holders, strict=True)
            if not is_new and holder == owner
        ]
        renewed = self._renewed(renewable, owner, ms)
        claimed = [
            bool(is_new) or name in renewed for name, is_new in zip(names, taken, strict=True)
        ]
        return claimed, replies[len(claims) :]

    def _renewed(self, names: Sequence[bytes], owner: bytes, ms: int) -> set[bytes]:
        replies = self._client.run(
            [command for name in names for command in (("PEXPIRE", name, ms), ("GET", name))]
        )
        return {name for name, holder in zip(names, replies[1::2], strict=True) if holder == owner}

    def _get(self, key: EntryKey) -> Entry | None:
        for _ in range(ATTEMPTS):
            beginning = self._entries.read_beginning(key.digest)
            if beginning is None:
                return None
            try:
                entry = self._read(key, beginning)
            except OtherFormat:
                return None
            except CorruptEntry:
                if self._entries.is_still(key.digest, beginning):
                    self.counts.add(corrupt=1)
                    with suppress(StoreUnavailable):
                        self._entries.remove_entries([key.digest])
                    return None
                continue  # replaced or evicted while it was read
            # A replica, or a user without write permission, still serves reads.
            with suppress(StoreUnavailable):
                self._entries.refresh_ttl(key.digest, beginning.left_ms)
            return entry
        return None

    def _read(self, key: EntryKey, beginning: Beginning) -> Entry | None:
        """Read the entry; None if it is larger than this store accepts."""
        if read_header(beginning.blob, key.digest).size_bytes > self._options.max_entry_bytes:
            return None
        return self._entries.read(key, beginning)


def _listed(digest: str, head: bytes, size: int) -> Listed:
    try:
        info = read_header(head, digest)
    except OtherFormat as error:
        return Listed(digest, None, size, None, skipped=str(error))
    except CorruptEntry as error:
        return Listed(digest, None, size, None, str(error))
    problem = None if size == info.size_bytes else f"{size} bytes, not {info.size_bytes}"
    return Listed(digest, info, size, None, problem)
