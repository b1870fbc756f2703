"""One tier of an arena: its threads, its queue, its breakers and its numbers.

All calls of the tier run on threads, so a tier that hangs costs the event loop nothing. All bytes
are compared with their checksum in both directions.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from ec_store.aio import on_thread
from ec_store.arena.arena import Arena
from ec_store.arena.fields import encode_header, parse_header
from ec_store.arena.index import Slot
from ec_store.arena.memory import Bytes, copy_in, in_one_part, parts_of
from ec_store.arena.protocol import ClaimKeys, TierStats
from ec_store.arena.tier import MAX_LOOKUPS, SharedTier, Tier, TierLimits
from ec_store.bounded import BoundedDict
from ec_store.buffers import Buffers
from ec_store.concurrency import Breaker, DaemonPool
from ec_store.entry import Entry, EntryInfo, checksum
from ec_store.errors import CorruptEntry, EntryTooLarge, StoreError, StoreUnavailable
from ec_store.keys import EntryKey

logger = logging.getLogger("vllm.ec_store")

LOOKUP_THREADS = 4
FETCH_THREADS = 4

QUEUE_NAMESPACES = 64
"""Upper bound of the deletions of namespaces that wait. A tier may look at all of its entries for
each, and entries wait behind them."""

FAILED_S = 5.0
"""Time in seconds for which a tier is not asked for an entry that could not be fetched from it."""

MAX_FAILED = 4096

Answer: TypeAlias = EntryInfo | bool | None
"""Fields of the header of an entry that was found. Of a missing one, whether this owner has its
claim now, or None if it was not claimed."""


@dataclass(slots=True, eq=False)
class _Release:
    """Release of claims of one owner. Each is another one."""

    owner: bytes


class TierLink:
    """Calls of one tier. Belongs to the event loop of the server.

    Attributes:
        shared: whether other hosts use the tier too.
        stats: numbers of the tier, without those that `read_stats` adds.
        late: breaker that is open while look-ups miss their deadline: they go on in the background,
            and no client waits for them.
    """

    def __init__(  # noqa: PLR0913 - all but the tier are the chain's
        self,
        name: str,
        tier: Tier,
        arena: Arena,
        memory: Bytes,
        *,
        clock: Callable[[], float],
        limits: TierLimits,
    ) -> None:
        """Create the link; `send_all` begins to send. Arguments are those of `TierChain`."""
        self.shared = isinstance(tier, SharedTier)
        self.stats = TierStats()
        arena.tiers[name] = self.read_stats
        self._tier = tier
        self._arena = arena
        self._memory = memory
        self._clock = clock
        self._limits = limits
        self._lookups = DaemonPool(LOOKUP_THREADS, f"ec-{name}-lookup")
        self._fetches = DaemonPool(FETCH_THREADS, f"ec-{name}-fetch")
        self._changes = DaemonPool(1, f"ec-{name}-send")  # in order: a delete after its write
        breaker = partial(Breaker, open_s=limits.skip_s)
        self.late = breaker(f"waiting for look-ups in the tier {name} of the arena")
        self._finding = breaker(f"looking up in the tier {name} of the arena")
        self._reading = breaker(f"reading from the tier {name} of the arena")
        self._writing = breaker(f"writing to the tier {name} of the arena")
        self._buffers = Buffers()
        self._running_lookups = 0
        self._failed: BoundedDict[bytes, float] = BoundedDict(MAX_FAILED)
        self._queue: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        """Writes, deletions and releases of claims that wait, in order."""
        self._releasing: dict[bytes, set[_Release]] = {}
        """Releases of claims that have not ended, by key."""
        self._claim_calls: dict[bytes, asyncio.Future[None]] = {}
        """Running calls that claim or release, by key: one at a time for each key."""
        self._removed: set[bytes] = set()
        self._purged: list[str] = []

    def read_stats(self) -> TierStats:
        """Return the numbers of the tier, of its breakers and of its own counts at this time."""
        stats = self.stats
        stats.found_corrupt = self._tier.counts["corrupt"]
        stats.skips_lookups = int(self._finding.open)
        stats.skips_waiting = int(self.late.open)
        stats.skips_reads = int(self._reading.open)
        stats.skips_writes = int(self._writing.open)
        return stats

    def close(self) -> None:
        """Close the tier; its calls that hang are left to their threads."""
        for pool in (self._lookups, self._fetches, self._changes):
            pool.close()
        self._tier.close()

    def askable(self, digests: Sequence[bytes]) -> list[bytes]:
        """Return what the tier may be asked for now, at most `max_keys`; the rest is skipped."""
        now_s = self._clock()
        asked = [
            digest
            for digest in digests
            if digest not in self._removed and self._failed.get(digest, 0.0) <= now_s
        ]
        failing = self._finding.open or self._reading.open
        busy = self._running_lookups >= MAX_LOOKUPS
        most = 0 if failing or busy else self._limits.max_keys
        self.stats.skipped += len(asked[most:])
        return asked[:most]

    async def find(self, digests: Sequence[bytes], claim: ClaimKeys | None) -> list[Answer]:
        """Look entries up, and claim the missing ones with `claim` if the tier is shared.

        Raises:
            StoreError: the tier failed.
        """
        self._running_lookups += 1
        purged = frozenset(self._purged)  # a purge that ends meanwhile came before this look-up
        try:
            if claim is None or not self.shared:
                find = partial(self._find, digests, (), claim, {})
                found = await on_thread(self._lookups, find)
            else:
                found = await self._find_and_claim(digests, claim)
        except StoreError as error:
            self._fail(self._finding, error)
            raise
        finally:
            self._running_lookups -= 1
        self._finding.succeeded()
        return [self._count_answer(digest, found[digest], purged) for digest in digests]

    async def _find_and_claim(
        self, digests: Sequence[bytes], claim: ClaimKeys
    ) -> dict[bytes, Answer]:
        async with self._claims_of(digests):
            index, now_s = self._arena.index, self._clock()
            claimed = [each for each in digests if index.may_claim(each, claim.owner, now_s)]
            waiting = [each for each in claimed if each in self._releasing]
            released = {each: self._releasing.pop(each) for each in waiting}
            return await on_thread(
                self._lookups, partial(self._find, digests, claimed, claim, released)
            )

    @asynccontextmanager
    async def _claims_of(self, digests: Sequence[bytes]) -> AsyncIterator[None]:
        """Wait until no other call changes the claims of these keys; others wait for this one."""
        calls = self._claim_calls
        while running := {calls[digest] for digest in digests if digest in calls}:
            await asyncio.wait(running)
        ended = asyncio.get_running_loop().create_future()
        calls.update(dict.fromkeys(digests, ended))
        try:
            yield
        finally:
            for digest in dict.fromkeys(digests):
                del calls[digest]
            ended.set_result(None)

    async def read(self, key: EntryKey, slot: Slot) -> bool:
        """Copy an entry to its place in the memory; False if it does not come from this tier."""
        copied = False
        try:
            copied = await on_thread(self._fetches, partial(self._copy_in, key, slot))
            self._reading.succeeded()
        except StoreError as error:
            self._fail(self._reading, error)
        if copied:
            self.stats.fetched += 1
            self.stats.fetched_bytes += slot.size_bytes
        else:
            self.stats.drops += 1
            self._failed[slot.digest] = self._clock() + FAILED_S
        return copied

    def record_late_read(self) -> None:
        self._fail(self._reading, f"an entry has not come within {self._limits.fetch_s:g} s")

    def record_late_lookup(self) -> None:
        self.stats.late += 1
        self.late.record_failure("they take too long")

    def offer(self, slot: Slot) -> None:
        """Queue an entry to be sent."""
        stats, limits, size_bytes = self.stats, self._limits, slot.size_bytes
        full = stats.queued >= limits.queue_entries
        full |= stats.queued > 0 and stats.queued_bytes + size_bytes > limits.queue_bytes
        if full or self._writing.open:
            stats.drops += 1
            return
        stats.queued += 1
        stats.queued_bytes += size_bytes
        self._queue.put_nowait(partial(self._send, slot.digest, size_bytes, self._clock()))

    def remove(self, digests: Sequence[bytes]) -> None:
        """Queue entries to be deleted. They are misses from now on."""
        if len(self._removed) + len(digests) > self._limits.queue_entries:
            self.stats.drops += len(digests)
            logger.warning("%d entries are not deleted in a tier: too many wait", len(digests))
            return
        self._removed.update(digests)
        call = partial(self._tier.remove, _names(digests))
        end = partial(self._removed.difference_update, digests)
        self._queue.put_nowait(partial(self._change, call, len(digests), end))

    def purge(self, namespace: str) -> None:
        """Queue a namespace to be deleted. Its entries are misses from now on."""
        if len(self._purged) >= QUEUE_NAMESPACES:
            self.stats.drops += 1
            logger.warning("the namespace %s is not deleted in a tier: too many wait", namespace)
            return
        self._purged.append(namespace)
        end = partial(self._purged.remove, namespace)
        self._queue.put_nowait(partial(self._change, partial(self._tier.purge, namespace), 1, end))

    def release(self, digests: Sequence[bytes], owner: bytes) -> None:
        """Queue claims to be released, after the entries that they were for were sent."""
        room = len(self._releasing) + len(digests) <= self._limits.queue_entries
        if self.shared and room and not self._writing.open:  # else they expire
            release = _Release(owner)
            for digest in digests:
                self._releasing.setdefault(digest, set()).add(release)
            self._queue.put_nowait(partial(self._release, digests, release))

    async def send_all(self) -> None:
        """Send and delete what waits, in order, until this task is cancelled."""
        while True:
            change = await self._queue.get()
            try:
                await change()
            except Exception:  # what waits behind it must be sent
                self.stats.errors += 1
                logger.exception("an entry cannot be sent to a tier of the arena")

    def _find(
        self,
        digests: Sequence[bytes],
        claimed: Sequence[bytes],
        claim: ClaimKeys | None,
        released: Mapping[bytes, set[_Release]],
    ) -> dict[bytes, Answer]:
        """Look entries up and claim them, as `find`. Runs on a thread.

        Claims of `released` are released first, of which another owner on this host gets some.
        """
        found: dict[bytes, Answer] = {}
        if claimed and claim is not None and isinstance(self._tier, SharedTier):
            for release in set[_Release]().union(*released.values()):
                ended = [digest for digest, releases in released.items() if release in releases]
                self._tier.release_claims(_names(ended), release.owner)
            answers = self._tier.claim_missing(_names(claimed), claim.owner, claim.seconds)
            found.update(zip(claimed, answers, strict=True))
        if others := [digest for digest in digests if digest not in found]:
            infos = self._tier.find(_names(others))
            found.update(zip(others, infos, strict=True))
        return found

    def _count_answer(self, digest: bytes, answer: Answer, purged: Collection[str]) -> Answer:
        """Count an answer, and return it; None for an entry that was deleted meanwhile."""
        if isinstance(answer, EntryInfo) and (
            digest in self._removed
            or answer.key.namespace in purged
            or answer.key.namespace in self._purged
        ):
            answer = None
        hit = isinstance(answer, EntryInfo)
        self.stats.hits += hit
        self.stats.misses += not hit
        self.stats.claims += answer is True
        self.stats.claimed_elsewhere += answer is False
        return answer

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
            sent = await on_thread(self._changes, partial(self._copy_out, slot))
        except CorruptEntry as error:
            self.stats.corrupt += 1
            index.discard(own, number)
            logger.warning("a corrupt entry was deleted, not sent to a tier: %s", error)
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
        # A look-up saves the way of the bytes; `put` counts a use in the tier of this host.
        if self.shared and self._tier.find([info.key.digest])[0] is not None:
            return False
        parts = parts_of(self._memory, slot.extents, slot.size_bytes)
        data = in_one_part([part.data for part in parts], self._buffers)
        # Without a checksum yet, the one that the tier computes is the first.
        if slot.checksum and checksum(data) != slot.checksum:
            raise CorruptEntry(f"the bytes of {slot.digest.hex()} do not match their checksum")
        entry = Entry(data.toreadonly(), info.dtype, info.shape, info.modality, info.metadata)
        return self._tier.put(info.key, entry)

    async def _release(self, digests: Sequence[bytes], release: _Release) -> None:
        """Release the claims that wait for it and were not taken again meanwhile."""
        if not isinstance(self._tier, SharedTier):
            return
        async with self._claims_of(digests):
            waiting = self._releasing
            ended = [each for each in dict.fromkeys(digests) if release in waiting.get(each, ())]
            if not ended:
                return
            for digest in ended:
                waiting[digest].discard(release)
                if not waiting[digest]:
                    del waiting[digest]
            call = partial(self._tier.release_claims, _names(ended), release.owner)
            await self._change(call, 0, lambda: None)

    async def _change(
        self, call: Callable[[], object], drops: int, end: Callable[[], None]
    ) -> None:
        """Delete or release in the tier; `drops` counts if it fails. `end` is always called."""
        try:
            await on_thread(self._changes, call)
        except StoreError as error:
            self.stats.drops += drops
            self._fail(self._writing, error)
        finally:
            end()

    def _fail(self, breaker: Breaker, reason: object) -> None:
        self.stats.errors += 1
        breaker.record_failure(reason)


def _names(digests: Sequence[bytes]) -> list[str]:
    return [digest.hex() for digest in dict.fromkeys(digests)]
