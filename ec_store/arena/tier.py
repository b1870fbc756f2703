"""Tier behind an arena, such as Redis: entries that were written on one host are found on others.

A committed entry is sent to the tier, and a look-up of a missing one asks the tier. All calls to it
run on threads. A slow or failing tier costs a look-up `LOOKUP_S`, and a breaker then skips it. All
bytes are compared with their checksum in both directions.

Entries that replace others stay on their host: the tier has no order of writes, so another host
could read the old one. Leases and claims hold on their host too.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

from ec_store.arena.arena import Arena
from ec_store.arena.fields import decode_name, encode_header, encode_name, parse_header
from ec_store.arena.index import Refusal, Slot
from ec_store.arena.memory import Bytes, copy_in, copy_out, parts_of
from ec_store.arena.protocol import TierStats
from ec_store.bounded import BoundedDict
from ec_store.buffers import Buffers
from ec_store.concurrency import OPEN_S, Breaker, DaemonPool
from ec_store.entry import Entry, EntryInfo, checksum
from ec_store.errors import (
    CorruptEntry,
    EntryTooLarge,
    StoreError,
    StoreUnavailable,
)
from ec_store.keys import EntryKey

logger = logging.getLogger("vllm.ec_store")

LOOKUP_S = 0.01
"""Time in seconds that a client waits for the tier's look-up; then the entry is a miss. Half of the
time that a proxy gives a look-up (`ec_store_budget_s`)."""

MAX_LOOKUPS = 64
"""Upper bound of the look-ups in the tier at once; further ones are misses."""

MAX_KEYS = 256
"""Upper bound of the entries in one look-up; further ones are misses. More take too long."""

LOOKUP_THREADS = 4
FETCH_THREADS = 4

QUEUE_BYTES = 512 * 2**20
"""Upper bound of the bytes that wait to be sent, and of those that are being fetched. One larger
entry is let in if nothing else waits."""

QUEUE_ENTRIES = 4096
"""Upper bound of the entries that wait to be sent, and of those that wait to be deleted."""

QUEUE_NAMESPACES = 4
"""Upper bound of the deletions of namespaces that wait. A tier may look at all of its entries for
each, and entries wait behind them."""

QUEUED_S = 30.0
"""Time in seconds after which an entry that still waits is not sent."""

FAILED_S = 5.0
"""Time in seconds for which an entry is a miss after it could not be fetched."""

MAX_FAILED = 4096

T = TypeVar("T")


@dataclass(slots=True)
class TierLimits:
    """Bounds of the transfers to and from a tier, as the constants of their names say.

    `skip_s` is the time in seconds for which a failing tier is skipped.
    """

    lookup_s: float = LOOKUP_S
    max_keys: int = MAX_KEYS
    queue_bytes: int = QUEUE_BYTES
    queue_entries: int = QUEUE_ENTRIES
    queued_s: float = QUEUED_S
    skip_s: float = OPEN_S


class Tier(Protocol):
    """Store behind an arena. Each method is called on threads, and has a deadline of its own.

    Every method may raise StoreUnavailable.
    """

    def find(self, digests: Sequence[str]) -> list[EntryInfo | None]:
        """Return the fields of the headers of entries, by the digests of their keys."""

    def get(self, key: EntryKey) -> Entry | None:
        """Return an entry, verified; None if it is missing or corrupt."""

    def put(self, key: EntryKey, entry: Entry) -> bool:
        """Write an entry with a checksum of its bytes; False if it exists.

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


class TierTransfers:
    """Transfers between an arena and its tier. Belongs to the event loop of the server.

    Attributes:
        stats: numbers of the tier.
    """

    def __init__(
        self,
        tier: Tier,
        arena: Arena,
        memory: Bytes,
        clock: Callable[[], float],
        limits: TierLimits,
    ) -> None:
        """Create the transfers; `start` begins to send.

        Args:
            tier: the tier, which `close` closes.
            arena: the arena.
            memory: its memory, mapped to write.
            clock: monotonic clock in seconds, that of the arena.
            limits: bounds of what is transferred.
        """
        self.stats = arena.tier = TierStats()
        self._tier = tier
        self._arena = arena
        self._memory = memory
        self._clock = clock
        self._limits = limits
        self._lookups = DaemonPool(LOOKUP_THREADS, "ec-tier-lookup")
        self._fetches = DaemonPool(FETCH_THREADS, "ec-tier-fetch")
        self._changes = DaemonPool(1, "ec-tier-send")  # in order: a delete after its write
        self._finding = Breaker("looking up in the tier of the arena", open_s=limits.skip_s)
        self._reading = Breaker("reading from the tier of the arena", open_s=limits.skip_s)
        self._writing = Breaker("writing to the tier of the arena", open_s=limits.skip_s)
        self._buffers = Buffers()
        self._running_lookups = 0
        self._fetch_bytes = 0
        self._failed: BoundedDict[bytes, float] = BoundedDict(MAX_FAILED)
        self._queue: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        """Writes and deletions that wait, in order."""
        self._removed: set[bytes] = set()
        self._purged: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._run(self._send_all())

    async def close(self) -> None:
        """End all transfers; calls of the tier that hang are left to their threads."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pool in (self._lookups, self._fetches, self._changes):
            pool.close()
        self._tier.close()

    def look_up(self, digests: Sequence[bytes]) -> "asyncio.Task[None] | None":
        """Look up in the tier what the arena lacks, and begin to fetch what it has.

        Returns:
            A task that ends within `LOOKUP_S`; None if there is nothing to look up.
        """
        now_s = self._clock()
        missing = [
            digest
            for digest in self._arena.index.lacking(digests, now_s)
            if digest not in self._removed and self._failed.get(digest, 0.0) <= now_s
        ]
        if not missing:
            return None
        failing = self._finding.open or self._reading.open
        if failing or self._running_lookups >= MAX_LOOKUPS:
            self.stats.skipped += len(missing)
            return None
        most = self._limits.max_keys
        self.stats.skipped += len(missing[most:])
        self._running_lookups += 1
        return self._run(self._look_up(missing[:most]))

    def offer(self, slot: Slot) -> None:
        """Queue a committed entry to be sent, unless it replaces another one."""
        stats, limits, size_bytes = self.stats, self._limits, slot.size_bytes
        if slot.replaces:
            return
        full = stats.queued >= limits.queue_entries
        full |= stats.queued > 0 and stats.queued_bytes + size_bytes > limits.queue_bytes
        if full or self._writing.open:
            stats.drops += 1
            return
        stats.queued += 1
        stats.queued_bytes += size_bytes
        self._queue.put_nowait(partial(self._send, slot.digest, size_bytes, self._clock()))

    def remove(self, digests: Sequence[bytes]) -> None:
        """Queue entries to be deleted, and abandon their fetches. They are misses from now on."""
        for digest in digests:
            self._arena.coming.pop(digest, None)
        if len(self._removed) + len(digests) > self._limits.queue_entries:
            self.stats.drops += len(digests)
            return
        self._removed.update(digests)
        names = list({digest.hex() for digest in digests})
        end = partial(self._removed.difference_update, digests)
        call = partial(self._tier.remove, names)
        self._queue.put_nowait(partial(self._delete, call, len(digests), end))

    def purge(self, name: bytes) -> None:
        """Queue a namespace to be deleted, and abandon its fetches.

        Its entries in the tier are misses from now on.
        """
        coming = self._arena.coming
        for digest in [digest for digest, each in coming.items() if each.namespace == name]:
            del coming[digest]
        try:
            namespace = decode_name(name)
        except UnicodeDecodeError:  # no key has it
            return
        if len(self._purged) >= QUEUE_NAMESPACES:
            self.stats.drops += 1
            return
        self._purged.append(namespace)
        end = partial(self._purged.remove, namespace)
        self._queue.put_nowait(partial(self._delete, partial(self._tier.purge, namespace), 1, end))

    async def _look_up(self, digests: Sequence[bytes]) -> None:
        names = [digest.hex() for digest in digests]
        try:
            async with asyncio.timeout(self._limits.lookup_s):
                infos = await _on(self._lookups, lambda: self._tier.find(names))
        except TimeoutError:
            text = f"a look-up has not ended within {self._limits.lookup_s:g} s"
            self._fail(self._finding, text)
            return
        except StoreError as error:
            self._fail(self._finding, error)
            return
        finally:
            self._running_lookups -= 1
        self._finding.succeeded()
        for digest, info in zip(digests, infos, strict=True):
            # It may have been deleted during the look-up.
            if info is None or digest in self._removed or info.key.namespace in self._purged:
                self.stats.misses += 1
            else:
                self.stats.hits += 1
                self._begin_fetch(digest, info)

    def _begin_fetch(self, digest: bytes, info: EntryInfo) -> None:
        """Take room for an entry and fetch it, unless it is there or on its way."""
        size_bytes = info.payload_bytes
        if self._fetch_bytes > 0 and self._fetch_bytes + size_bytes > self._limits.queue_bytes:
            self.stats.drops += 1
            return
        slot = Slot(digest, encode_name(info.key.namespace), size_bytes)
        slot.header = encode_header(info.key, info)
        number = self._arena.index.begin(self._arena.own, slot, self._clock())
        if isinstance(number, Refusal):
            self.stats.drops += number in {Refusal.FULL, Refusal.TOO_LARGE}
            return
        self._fetch_bytes += size_bytes
        self._arena.coming[digest] = slot
        self._run(self._fetch(number, slot, info.key))

    async def _fetch(self, number: int, slot: Slot, key: EntryKey) -> None:
        copied = False
        try:
            copied = await _on(self._fetches, partial(self._copy_in, key, slot))
            self._reading.succeeded()
        except StoreError as error:
            self._fail(self._reading, error)
        finally:
            self._end_fetch(number, slot, copied=copied)

    def _end_fetch(self, number: int, slot: Slot, *, copied: bool) -> None:
        """End the write of an entry, or give it up if it was not copied."""
        index, own, now_s = self._arena.index, self._arena.own, self._clock()
        self._fetch_bytes -= slot.size_bytes
        if self._arena.coming.get(slot.digest) is not slot:  # it was deleted meanwhile
            index.abort(own, number)
        else:
            del self._arena.coming[slot.digest]
            if copied and index.commit(own, number, slot.header, now_s):
                self.stats.fetched += 1
                self.stats.fetched_bytes += slot.size_bytes
            elif not copied:
                index.abort(own, number)
                self.stats.drops += 1
                self._failed[slot.digest] = now_s + FAILED_S

    def _copy_in(self, key: EntryKey, slot: Slot) -> bool:
        """Copy an entry into the memory; return False if it is not there any more.

        Runs on a thread. The tier has verified the bytes. A fetch that has waited for its thread
        while others failed is not begun.
        """
        if self._reading.open:
            raise StoreUnavailable("the tier keeps failing")
        entry = self._tier.get(key)
        # Clients were told of the entry that was looked up: another one must not take its place.
        if entry is None or encode_header(key, entry) != slot.header:
            return False
        copy_in(entry.data, parts_of(self._memory, slot.extents, slot.size_bytes))
        slot.checksum = checksum(entry.data)
        return True

    async def _send_all(self) -> None:
        """Send and delete what waits, in order, until this task is cancelled."""
        while True:
            change = await self._queue.get()
            try:
                await change()
            except Exception:  # what waits behind it must be sent
                self.stats.errors += 1
                logger.exception("an entry cannot be sent to the tier of the arena")

    async def _send(self, digest: bytes, size_bytes: int, since_s: float) -> None:
        """Send an entry that has waited since a time of the arena's clock."""
        index, own, now_s = self._arena.index, self._arena.own, self._clock()
        self.stats.queued -= 1
        self.stats.queued_bytes -= size_bytes
        pin = None
        if now_s - since_s <= self._limits.queued_s and not self._writing.open:
            [pin] = index.pin(own, [digest], now_s)
        if pin is None:  # too late, or it was evicted
            self.stats.drops += 1
            return
        number, slot = pin
        try:
            sent = await _on(self._changes, partial(self._copy_out, slot))
        except CorruptEntry as error:
            self.stats.corrupt += 1
            index.discard(own, number)
            logger.warning("a corrupt entry was deleted, not sent to the tier: %s", error)
        except StoreError as error:
            self.stats.drops += 1
            if not isinstance(error, EntryTooLarge):
                self._fail(self._writing, error)
        else:
            self._writing.succeeded()
            self.stats.sent += sent
            self.stats.sent_bytes += slot.size_bytes * sent
            self.stats.known += not sent
        finally:
            index.unpin(own, [number], self._clock())

    def _copy_out(self, slot: Slot) -> bool:
        """Send a pinned entry; return False if the tier has it. Runs on a thread.

        Raises:
            CorruptEntry: its header or its bytes are not those that were written.
        """
        info = parse_header(slot.header)
        if info.key.digest != slot.digest.hex() or info.payload_bytes != slot.size_bytes:
            raise CorruptEntry(f"the header of {slot.digest.hex()} is that of another entry")
        if self._tier.find([info.key.digest])[0] is not None:
            return False
        parts = [part.data for part in parts_of(self._memory, slot.extents, slot.size_bytes)]
        if len(parts) == 1:
            [data] = parts
        else:
            data = copy_out(parts, self._buffers.take_buffer(slot.size_bytes))
        # Without a checksum yet, the one that the tier computes is the first.
        if slot.checksum and checksum(data) != slot.checksum:
            raise CorruptEntry(f"the bytes of {slot.digest.hex()} do not match their checksum")
        entry = Entry(data.toreadonly(), info.dtype, info.shape, info.modality, info.metadata)
        return self._tier.put(info.key, entry)

    async def _delete(self, call: Callable[[], int], drops: int, end: Callable[[], None]) -> None:
        """Delete entries of the tier; `drops` counts if it fails. `end` is called in any case."""
        try:
            await _on(self._changes, call)
        except StoreError as error:
            self.stats.drops += drops
            self._fail(self._writing, error)
        finally:
            end()

    def _fail(self, breaker: Breaker, reason: object) -> None:
        self.stats.errors += 1
        breaker.record_failure(reason)

    def _run(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _on(pool: DaemonPool, call: Callable[[], T]) -> T:
    """Run a call on a thread. Raise StoreUnavailable if no thread can be started."""
    future = pool.submit(call)
    if future.cancelled():
        raise StoreUnavailable("no thread can be started")
    return await asyncio.wrap_future(future)
