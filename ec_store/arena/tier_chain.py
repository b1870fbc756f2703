"""Tiers behind an arena: what is looked up in them, fetched from them and sent to them.

**Look-up.** What the arena lacks is looked up in the first tier, and what that lacks in the second.
A client waits for `TierLimits.lookup_s` at most, of which each tier has its share. A late look-up
goes on in the background. What is found is fetched, once on a host, and from the next tier if the
first one does not have it any more.

**Which entries a tier gets.** A tier that hosts share gets every new entry at once: another host
may wait for it. A tier of this host alone gets an entry at its second use here, which is a lease,
a second read, or a second arrival. (The read of a consumer for which it was encoded is the first.)
So what is used once writes nothing and evicts nothing there. While it is used, it is written again
from time to time, which only counts as a use there. An entry that comes from a tier is in the arena
like any other. docs/decisions/045-tiers.md compares these rules with others.

**Entries that replace others** stay in the memory: a tier has no order of the writes of several
hosts, so another host could read the old one.

**Claims** of missing entries are taken in the shared tier too, with the look-up. If it does not
answer in time, the claim of this host counts.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from ec_store.arena.arena import Arena
from ec_store.arena.fields import encode_header
from ec_store.arena.index import Refusal, Slot
from ec_store.arena.memory import Bytes
from ec_store.arena.protocol import ClaimKeys, Find, Read
from ec_store.arena.tier import Tier, TierLimits
from ec_store.arena.tier_link import Answer, TierLink
from ec_store.bounded import BoundedDict
from ec_store.entry import EntryInfo
from ec_store.errors import StoreError
from ec_store.keys import EntryKey, decode_name, encode_name

MAX_WRITTEN = 65536
"""Upper bound of the entries that are remembered after their arrival, to notice a second one, and
to know what the encode took when one comes back from a tier: about 13 MB."""

T = TypeVar("T")


class TierChain:
    """Tiers of an arena. Belongs to the event loop of the server."""

    def __init__(
        self,
        tiers: Mapping[str, Tier],
        arena: Arena,
        memory: Bytes,
        clock: Callable[[], float],
        limits: TierLimits,
    ) -> None:
        """Create the chain; `start` begins to send.

        Args:
            tiers: the tiers by their names, the one that is asked first in front. `close` closes
                them.
            arena: the arena.
            memory: its memory, mapped to write.
            clock: monotonic clock in seconds, that of the arena.
            limits: bounds of what is transferred, for each tier.
        """
        self._links = [
            TierLink(name, tier, arena, memory, clock=clock, limits=limits)
            for name, tier in tiers.items()
        ]
        self._own_links = [link for link in self._links if not link.shared]
        self._arena = arena
        self._clock = clock
        self._limits = limits
        self._fetch_bytes = 0
        self._written: BoundedDict[bytes, float] = BoundedDict(MAX_WRITTEN)
        """Measured seconds of the encodes of entries that were written on this host, by digest."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        if self._own_links:
            self._arena.watch_uses(self._offer_used, self._limits.touch_s)
        for link in self._links:
            self._run(link.send_all())

    async def close(self) -> None:
        """End all transfers, and close the tiers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links:
            link.close()

    def look_up(self, request: Find | Read | ClaimKeys) -> "asyncio.Task[frozenset[bytes]] | None":
        """Look up what a request names and the arena lacks, and begin to fetch what is found.

        Returns:
            A task that ends within `lookup_s`, with the keys that owners on other hosts have
            claimed. None: there is nothing to look up.
        """
        missing = self._arena.index.lacking(request.digests, self._clock())
        if not missing:
            return None
        claim = request if isinstance(request, ClaimKeys) else None
        return self._run(self._look_up(list(dict.fromkeys(missing)), claim))

    def offer_new(self, slot: Slot) -> None:
        """Queue a new entry for the tiers that get it at once."""
        if slot.replaces:
            return
        for link in self._links:
            if link.shared:
                link.offer(slot)
        self._offer_if_repeated(slot)

    def _offer_if_repeated(self, slot: Slot) -> None:
        """Queue a new entry for the tiers of this host if it is not the first one of its key."""
        if self._own_links and slot.digest in self._written:
            self._arena.note_offer(slot, self._clock())
            self._offer_used(slot)
        self._written[slot.digest] = slot.encode_s or self._written.get(slot.digest, 0.0)

    def _offer_used(self, slot: Slot) -> None:
        """Queue a used entry for the tiers of this host."""
        if not slot.replaces:
            for link in self._own_links:
                link.offer(slot)

    def remove(self, digests: Sequence[bytes]) -> None:
        """Delete entries in the tiers a moment later, and abandon their fetches."""
        for digest in digests:
            self._arena.coming.pop(digest, None)
        for link in self._links:
            link.remove(digests)

    def purge(self, name: bytes) -> None:
        """Delete a namespace in the tiers a moment later, and abandon its fetches."""
        coming = self._arena.coming
        for digest in [digest for digest, each in coming.items() if each.namespace == name]:
            del coming[digest]
        try:
            namespace = decode_name(name)
        except UnicodeDecodeError:  # no key has it
            return
        for link in self._links:
            link.purge(namespace)

    def release(self, digests: Sequence[bytes], owner: bytes) -> None:
        """Release claims in the tiers a moment later."""
        for link in self._links:
            link.release(digests, owner)

    async def _look_up(self, digests: Sequence[bytes], claim: ClaimKeys | None) -> frozenset[bytes]:
        """Look up in one tier after the other; return what other hosts have claimed."""
        share_s = self._limits.lookup_s / len(self._links)
        elsewhere: frozenset[bytes] = frozenset()
        for place, link in enumerate(self._links):
            if claim is not None and not (claim.find or link.shared):
                continue
            asked = link.askable(digests)
            answers: Sequence[Answer] = ()
            if asked:
                # Of a late tier no client waits for the claim, and others must not wait for it.
                finding = self._run(self._find(place, asked, None if link.late.open else claim))
                if not link.late.open:
                    await asyncio.wait({finding}, timeout=share_s)
                if finding.done():
                    link.late.succeeded()
                    answers = finding.result()
                else:
                    link.record_late_lookup()
            if claim is not None and link.shared and not answers:
                link.stats.claimed_alone += len(digests)
            answered = dict(zip(asked, answers, strict=False))
            digests = [each for each in digests if not isinstance(answered.get(each), EntryInfo)]
            elsewhere = frozenset(each for each in digests if answered.get(each) is False)
            if not digests:
                break
        return elsewhere

    async def _find(
        self, place: int, digests: Sequence[bytes], claim: ClaimKeys | None
    ) -> Sequence[Answer]:
        """Look up in one tier, and begin to fetch what it has; empty if it failed."""
        try:
            answers = await self._links[place].find(digests, claim)
        except StoreError:
            return ()
        for digest, answer in zip(digests, answers, strict=True):
            if isinstance(answer, EntryInfo):
                self._begin_fetch(place, digest, answer)
        return answers

    def _begin_fetch(self, place: int, digest: bytes, info: EntryInfo) -> None:
        """Take room for an entry and fetch it, unless it is there or on its way."""
        size_bytes, stats = info.payload_bytes, self._links[place].stats
        if self._fetch_bytes > 0 and self._fetch_bytes + size_bytes > self._limits.queue_bytes:
            stats.drops += 1
            return
        slot = Slot(digest, encode_name(info.key.namespace), size_bytes)
        slot.header = encode_header(info.key, info)
        number = self._arena.index.begin(self._arena.own, slot, self._clock())
        if isinstance(number, Refusal):
            stats.drops += number in {Refusal.FULL, Refusal.TOO_LARGE}
            return
        self._fetch_bytes += size_bytes
        self._arena.coming[digest] = slot
        self._run(self._fetch(number, slot, info.key, self._links[place:]))

    async def _fetch(
        self, number: int, slot: Slot, key: EntryKey, links: Sequence[TierLink]
    ) -> None:
        """Fetch an entry from the first of these tiers that has it."""
        # Of a tier that hangs, the thread may still write to the place, which stays till it ends.
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._limits.fetch_s, self._give_up, slot, links[0])
        source = None
        try:
            for link in links:
                if await link.read(key, slot):
                    source = link
                    break
        finally:
            timer.cancel()
            self._end_fetch(number, slot, source)

    def _give_up(self, slot: Slot, link: TierLink) -> None:
        """Make an entry that does not come a miss."""
        if self._arena.coming.get(slot.digest) is slot:
            del self._arena.coming[slot.digest]
            link.record_late_read()

    def _end_fetch(self, number: int, slot: Slot, source: TierLink | None) -> None:
        """End the write of an entry, or give it up if it did not come."""
        index, own, now_s = self._arena.index, self._arena.own, self._clock()
        self._fetch_bytes -= slot.size_bytes
        awaited = self._arena.coming.get(slot.digest) is slot  # else it was deleted meanwhile
        if awaited:
            del self._arena.coming[slot.digest]
        if not awaited or source is None:
            index.abort(own, number)
        elif index.commit(own, number, slot.header, now_s, self._written.get(slot.digest, 0.0)):
            if source.shared:
                self._offer_if_repeated(slot)
            else:
                self._arena.note_offer(slot, now_s)

    def _run(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
