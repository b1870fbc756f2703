"""Entries of an arena and their users: what is kept, pinned, begun, leased and claimed. Pure.

The server calls it on its event loop, with the time. No method waits or copies a byte.
"""

import enum
import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from ec_store.arena.extents import PAGE_BYTES, Extent, ExtentAllocator
from ec_store.arena.worth import EncodeRate, OrderTrial, Ranked, WorthOrder

MAX_CLAIMS = 65536
"""Upper bound of the claims of one client: it gets no more."""

MAX_UNHASHED = 4096
"""Upper bound of the entries that wait for their checksum."""

ENTRY_BYTES = 1408
"""Memory of an index for one entry beside its header, about, in a memory that has turned over."""

INDEX_SHARE = 32
MIN_INDEX_BYTES = 16 * 2**20
"""An index takes at most this much memory, or its share of the memory of the entries if that is
more: enough for entries of 64 KiB and their headers. Smaller ones are evicted earlier."""


class Refusal(enum.Enum):
    """Reason why a write was not begun."""

    THERE = "there"
    """The entry exists."""
    BEGUN = "begun"
    """Another write of the entry was begun and has not ended."""
    FULL = "full"
    """All entries are pinned, leased or being written."""
    TOO_LARGE = "too large"
    """The entry is larger than the memory, or than one client may write at once."""


@dataclass(slots=True, eq=False)
class Slot:
    """Place of one entry.

    Attributes:
        digest: digest of the entry's key.
        namespace: namespace of the key.
        size_bytes: bytes of its payload.
        replaces: whether it takes the place of an entry of its key.
        extents: bytes that it takes, in order.
        header: description of the entry; empty while it is being written. The index never reads it.
        checksum: checksum of the payload; empty until it was computed.
        encode_s: seconds that its encode took, as its writer has measured them; 0: unknown.
        reads: number of its pins so far.
        pins: number of its readers.
        leased_until_s: end of its longest lease.
        lease_noted: whether its index counts it as a leased entry.
        used_s: time of its last use.
        evictable: whether its index counts it as an entry that is not in use.
        uses: number of its uses that `Arena` has counted, until it was offered to a tier.
        offered_s: time when it was last offered to a tier of this host, or came from it.
        ranked: its rank by worth; None while it is no entry.
    """

    digest: bytes
    namespace: bytes
    size_bytes: int
    replaces: bool = False
    extents: tuple[Extent, ...] = ()
    header: bytes = b""
    checksum: str = ""
    encode_s: float = 0.0
    reads: int = 0
    pins: int = 0
    leased_until_s: float = 0.0
    lease_noted: bool = False
    used_s: float = 0.0
    evictable: bool = False
    uses: int = 0
    offered_s: float = -math.inf
    ranked: Ranked | None = None

    @property
    def taken_bytes(self) -> int:
        """Return the bytes that it takes, in whole pages."""
        return sum(extent.size_bytes for extent in self.extents)

    @property
    def counted_bytes(self) -> int:
        """Return the bytes that count for its clients: also without payload it takes a page."""
        return max(self.size_bytes, PAGE_BYTES)

    def is_in_use(self, now_s: float) -> bool:
        """Return whether it is pinned or leased, and so must stay."""
        return self.pins > 0 or self.leased_until_s > now_s


@dataclass(slots=True, eq=False)
class Client:
    """Connection of a process, and all that it holds.

    Attributes:
        pid, role: as in `ClientUse`.
        pins: pinned entry and time of the pin, by number.
        writes: begun write, by number.
        claims: digests that it has claimed last.
    """

    pid: int = 0
    role: str = ""
    pins: dict[int, tuple[Slot, float]] = field(default_factory=dict)
    writes: dict[int, Slot] = field(default_factory=dict)
    claims: set[bytes] = field(default_factory=set)
    pinned_bytes: int = 0
    begun_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ClaimRecord:
    """Right of an owner to produce an entry; `client` has taken or renewed it last."""

    client: Client
    owner: bytes
    until_s: float


class ArenaIndex:
    """Index of the entries of one memory. Not thread-safe; times are monotonic seconds.

    Every operation on a key takes constant time, but for `begin`, which evicts as many entries as
    it needs to: those of the least worth first, or the least recently used, whichever has saved
    more lately. It passes over those in use, but refuses a write without looking at them.

    Attributes:
        unhashed: entries that wait for their checksum, at most `MAX_UNHASHED`. An entry that finds
            no room waits from its next pin on.
        evictions: number of evicted entries.
        saved_s: encode seconds of the entries that were pinned, where they are known. The first pin
            of an entry saves none: it hands it from its encoder to its reader.
        trial: trial of the orders in which entries may be evicted.
    """

    def __init__(
        self,
        extents: ExtentAllocator,
        *,
        client_bytes: int | None = None,
        ttl_s: float = math.inf,
    ) -> None:
        """Create an empty index.

        Args:
            extents: allocator of the memory.
            client_bytes: upper bound of the bytes that one client has pinned, and of those that it
                has begun to write; None: all of the memory.
            ttl_s: time after its last use at which an entry expires.
        """
        self.unhashed: OrderedDict[Slot, None] = OrderedDict()
        self.evictions = 0
        self.saved_s = 0.0
        self._most_index_bytes = max(MIN_INDEX_BYTES, extents.size_bytes // INDEX_SHARE)
        most_entries = self._most_index_bytes // ENTRY_BYTES
        self.trial = OrderTrial(extents.size_bytes, extents.size_bytes // most_entries)
        self._worth = WorthOrder(extents.size_bytes)
        self._rate = EncodeRate()
        self._extents = extents
        self._client_bytes = client_bytes or extents.size_bytes
        self._ttl_s = ttl_s
        self._entries: OrderedDict[bytes, Slot] = OrderedDict()
        """Entries, the least recently used first."""
        self._digests: list[set[bytes]] = [set() for _ in range(256)]
        """Digests of the entries, by their first byte."""
        self._index_bytes = 0
        self._lease_ends: list[tuple[float, int, Slot]] = []
        """Heap of the leased entries by the end of their lease, or of the one before it; also of
        those that were deleted meanwhile."""
        self._evictable_bytes = 0
        """Bytes that the entries take that are not in use, as of the last `_end_leases`."""
        self._writing: dict[bytes, Slot] = {}
        self._claims: dict[bytes, ClaimRecord] = {}
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def taken_bytes(self) -> int:
        """Return the bytes that are not free, in whole pages."""
        return self._extents.size_bytes - self._extents.free_bytes

    def slots(self) -> Iterator[Slot]:
        """Yield the entries, the least recently used first."""
        yield from self._entries.values()

    def slots_after(self, after: bytes, count: int) -> list[Slot]:
        """Return the next entries by digest, at most `count`; empty at the end.

        Of `n` entries it sorts `n / 256`, or as many such parts as it needs.
        """
        digests: list[bytes] = []
        for part in self._digests[after[0] if after else 0 :]:
            digests += sorted(digest for digest in part if digest > after)
            if len(digests) >= count:
                break
        return [self._entries[digest] for digest in digests[:count]]

    def leased(self, now_s: float) -> Sequence[Slot]:
        """Return the leased entries; the cost grows with their number."""
        self._end_leases(now_s)
        ends = [each for each in self._lease_ends if self._is_entry(each[2])]
        if len(self._lease_ends) > 2 * len(ends):
            heapq.heapify(ends)
            self._lease_ends = ends
        return [slot for _, _, slot in ends]

    def find(self, digests: Iterable[bytes], now_s: float) -> list[Slot | None]:
        """Return the entries of these keys."""
        get, used_before_s = self._entries.get, now_s - self._ttl_s
        return [
            slot
            if (slot := get(digest)) is None or slot.used_s > used_before_s
            else self._find(digest, now_s)
            for digest in digests
        ]

    def lease(self, digests: Iterable[bytes], seconds: float, now_s: float) -> list[Slot | None]:
        """Return the entries of these keys, which are not evicted for this time."""
        found = self.find(digests, now_s)
        for slot in found:
            if slot is not None:
                self._count_use(slot, now_s)
                slot.leased_until_s = max(slot.leased_until_s, now_s + seconds)
                self._note_lease(slot)
                self._count(slot, now_s)
        return found

    def pin(
        self, client: Client, digests: Iterable[bytes], now_s: float
    ) -> list[tuple[int, Slot] | None]:
        """Pin entries for a client, which may read them until it unpins them.

        Returns:
            For each key the number of the pin and the entry. None if there is no entry, or if the
            client would have more bytes pinned than it may.
        """
        pins: list[tuple[int, Slot] | None] = []
        for slot in self.find(digests, now_s):
            if slot is None or client.pinned_bytes + slot.counted_bytes > self._client_bytes:
                pins.append(None)
                continue
            self._numbers += 1
            client.pins[self._numbers] = (slot, now_s)
            client.pinned_bytes += slot.counted_bytes
            slot.pins += 1
            self.saved_s += slot.encode_s if slot.reads else 0.0
            slot.reads += 1
            self._count(slot, now_s)
            self._count_use(slot, now_s)
            self._hash_later(slot)
            pins.append((self._numbers, slot))
        return pins

    def unpin(self, client: Client, numbers: Iterable[int], now_s: float) -> None:
        """Release pins of a client; unknown numbers are ignored."""
        for number in numbers:
            if pinned := client.pins.pop(number, None):
                slot, _ = pinned
                client.pinned_bytes -= slot.counted_bytes
                slot.pins -= 1
                if self._is_entry(slot):
                    self._count(slot, now_s)
                    self._use(slot, now_s)
                else:
                    self._free(slot)

    def begin(self, client: Client, slot: Slot, now_s: float) -> int | Refusal:
        """Give a slot its extents for a client to write; evict entries until there is room.

        Returns:
            The number of the write, or the reason why it was not begun. An entry that exists
            counts as used.
        """
        if not slot.replaces:
            if (existing := self._find(slot.digest, now_s)) is not None:
                self._count_use(existing, now_s)
                return Refusal.THERE
            if slot.digest in self._writing:
                return Refusal.BEGUN
        if slot.size_bytes > self._client_bytes:
            return Refusal.TOO_LARGE
        if client.begun_bytes + slot.counted_bytes > self._client_bytes:
            return Refusal.FULL
        self._end_leases(now_s)
        while (
            self._index_bytes > self._most_index_bytes
            or (extents := self._extents.allocate(slot.size_bytes)) is None
        ):
            missing_bytes = max(1, slot.size_bytes - self._extents.free_bytes)
            if missing_bytes > self._evictable_bytes:
                return Refusal.FULL
            choose = self._least_worth if self.trial.by_worth else self._least_used
            evicted = choose(missing_bytes, now_s)
            for each in evicted:
                self._remove(each, evicted=True)
            self.evictions += len(evicted)
        slot.extents = extents
        if not slot.replaces:
            self._writing[slot.digest] = slot
        self._numbers += 1
        client.writes[self._numbers] = slot
        client.begun_bytes += slot.counted_bytes
        return self._numbers

    def commit(
        self, client: Client, number: int, header: bytes, now_s: float, encode_s: float = 0.0
    ) -> bool:
        """End a write; return whether the entry is stored.

        It is not if another write of the key was committed first, and does not replace it. A
        replaced entry's lease protects the new one, and its uses count for it. `encode_s` is as in
        `Slot`.

        Raises:
            KeyError: the client has begun no such write.
        """
        slot = self._end_write(client, number)
        old = self._find(slot.digest, now_s)
        if old is not None:
            if not slot.replaces:
                self._free(slot)
                return False
            self._remove(old, evicted=True)
            slot.leased_until_s = old.leased_until_s
        slot.header, slot.used_s, slot.encode_s = header, now_s, encode_s
        self._entries[slot.digest] = slot
        rate = self._rate.compare(slot.counted_bytes, encode_s)
        slot.ranked = self._worth.enter(slot.digest, slot.counted_bytes, rate)
        self.trial.refer(slot.digest, slot.counted_bytes, rate)
        if slot.leased_until_s > now_s:
            self._note_lease(slot)
        self._count(slot, now_s)
        self._digests[slot.digest[0]].add(slot.digest)
        self._index_bytes += ENTRY_BYTES + len(header)
        self._hash_later(slot)
        return True

    def abort(self, client: Client, number: int) -> None:
        """Give up a write. Raise KeyError if the client has begun no such write."""
        self._free(self._end_write(client, number))

    def discard(self, client: Client, number: int) -> bool:
        """Delete the entry of a pin; return False if it was replaced or deleted meanwhile."""
        slot, _ = client.pins.get(number, (None, 0.0))
        if slot is None or not self._is_entry(slot):
            return False
        self._remove(slot)
        return True

    def delete(self, digests: Iterable[bytes]) -> int:
        """Delete entries, leased or not, and return how many existed.

        The bytes of a pinned entry are free after its last pin.
        """
        before = len(self._entries)
        for digest in digests:
            if slot := self._entries.get(digest):
                self._remove(slot)
        return before - len(self._entries)

    def purge(self, namespace: bytes) -> int:
        """Delete the entries of a namespace; the cost grows with the number of all entries."""
        return self.delete([slot.digest for slot in self.slots() if slot.namespace == namespace])

    def expire(self, now_s: float) -> None:
        """Delete expired entries that are not in use, and expired claims.

        The cost grows with the numbers of leases and claims.
        """
        self.leased(now_s)
        for digest in [key for key, claim in self._claims.items() if claim.until_s <= now_s]:
            self._end_claim(digest)
        used_before_s = now_s - self._ttl_s
        old = takewhile(lambda slot: slot.used_s <= used_before_s, self._entries.values())
        for slot in [slot for slot in old if not slot.is_in_use(now_s)]:
            self._remove(slot)

    def claim(
        self, client: Client, digests: Iterable[bytes], owner: bytes, seconds: float, now_s: float
    ) -> list[bool]:
        """Claim keys for an owner; return for each whether the owner holds its claim now.

        A claim belongs to the client that took or renewed it last, and ends with its connection.
        """
        claims = []
        for digest in digests:
            free = self.may_claim(digest, owner, now_s)
            free &= digest in client.claims or len(client.claims) < MAX_CLAIMS
            claims.append(free)
            if free:
                if (claim := self._claims.get(digest)) is not None:
                    claim.client.claims.discard(digest)
                self._claims[digest] = ClaimRecord(client, owner, now_s + seconds)
                client.claims.add(digest)
        return claims

    def may_claim(self, digest: bytes, owner: bytes, now_s: float) -> bool:
        """Return whether no other owner has the claim of a key."""
        claim = self._claims.get(digest)
        return claim is None or claim.until_s <= now_s or claim.owner == owner

    def release(self, digests: Iterable[bytes], owner: bytes) -> None:
        """Release claims of an owner; those of others stay."""
        for digest in digests:
            claim = self._claims.get(digest)
            if claim is not None and claim.owner == owner:
                self._end_claim(digest)

    def lacking(self, digests: Iterable[bytes], now_s: float) -> list[bytes]:
        """Return the keys of entries that neither exist nor are being written."""
        return [
            digest
            for digest in digests
            if digest not in self._writing and self._find(digest, now_s) is None
        ]

    def disconnect(self, client: Client) -> None:
        """End the claims of a client that is gone, and let others write what it had begun.

        Its pins and the bytes that it had begun to write stay until `forget`: a device may still
        be copying them.
        """
        for digest in list(client.claims):
            self._end_claim(digest)
        for slot in client.writes.values():
            self._end_writing(slot)

    def forget(self, client: Client, now_s: float) -> None:
        """Free all that a client that is gone had pinned or begun, after `disconnect`."""
        self.unpin(client, list(client.pins), now_s)
        for number in list(client.writes):
            self.abort(client, number)

    def _find(self, digest: bytes, now_s: float) -> Slot | None:
        slot = self._entries.get(digest)
        if slot is None or slot.used_s > now_s - self._ttl_s or slot.is_in_use(now_s):
            return slot
        self._remove(slot)
        return None

    def _is_entry(self, slot: Slot) -> bool:
        """Return whether a slot is still the entry of its key."""
        return self._entries.get(slot.digest) is slot

    def _count_use(self, slot: Slot, now_s: float) -> None:
        """Count a use of an entry, by the request of a client for it."""
        self._use(slot, now_s)
        if (ranked := slot.ranked) is not None:
            self._worth.use(ranked)
            self.trial.refer(ranked.digest, ranked.size_bytes, ranked.rate)

    def _use(self, slot: Slot, now_s: float) -> None:
        """Note that an entry is in use, so that `_entries` stays in the order of the last uses."""
        slot.used_s = now_s
        self._entries.move_to_end(slot.digest)

    def _least_used(self, size_bytes: int, now_s: float) -> list[Slot]:
        """Return the least recently used entries that take at least so many bytes together.

        `_evictable_bytes` are as many. Entries in use count as used now: each is passed over once,
        however often room is made.
        """
        found: list[Slot] = []
        in_use: list[Slot] = []
        for slot in self._entries.values():
            if slot.is_in_use(now_s):
                in_use.append(slot)
                continue
            found.append(slot)
            size_bytes -= slot.taken_bytes
            if size_bytes <= 0:
                break
        for slot in in_use:
            self._use(slot, now_s)
        return found

    def _least_worth(self, size_bytes: int, now_s: float) -> list[Slot]:
        """Return the entries of the least worth that take at least so many bytes together.

        `_evictable_bytes` are as many. Entries in use are set aside until they are not.
        """
        found: list[Slot] = []
        while size_bytes > 0 and (ranked := self._worth.pop()):
            slot = self._entries[ranked.digest]
            if not slot.is_in_use(now_s):
                found.append(slot)
                size_bytes -= slot.taken_bytes
        return found

    def _note_lease(self, slot: Slot) -> None:
        if not slot.lease_noted:
            slot.lease_noted = True
            heapq.heappush(self._lease_ends, self._lease_end(slot))

    def _lease_end(self, slot: Slot) -> tuple[float, int, Slot]:
        self._numbers += 1  # no two slots are compared
        return slot.leased_until_s, self._numbers, slot

    def _end_leases(self, now_s: float) -> None:
        """Count the entries that are leased no more; each lease costs this once."""
        while self._lease_ends and self._lease_ends[0][0] <= now_s:
            _, _, slot = heapq.heappop(self._lease_ends)
            if slot.leased_until_s > now_s and self._is_entry(slot):
                heapq.heappush(self._lease_ends, self._lease_end(slot))  # it was renewed
            else:
                slot.lease_noted = False
                self._count(slot, now_s)

    def _count(self, slot: Slot, now_s: float) -> None:
        """Keep `_evictable_bytes` after a change of an entry."""
        evictable = self._is_entry(slot) and not slot.is_in_use(now_s)
        if evictable is not slot.evictable:
            slot.evictable = evictable
            self._evictable_bytes += slot.taken_bytes if evictable else -slot.taken_bytes
            if evictable and slot.ranked is not None:
                self._worth.put_back(slot.ranked)

    def _hash_later(self, slot: Slot) -> None:
        if not slot.checksum and len(self.unhashed) < MAX_UNHASHED:
            self.unhashed[slot] = None

    def _remove(self, slot: Slot, *, evicted: bool = False) -> None:
        del self._entries[slot.digest]
        if slot.ranked is not None:
            self._worth.leave(slot.ranked, evicted=evicted)
            slot.ranked = None
        self._digests[slot.digest[0]].discard(slot.digest)
        self._index_bytes -= ENTRY_BYTES + len(slot.header)
        self.unhashed.pop(slot, None)
        if slot.evictable:
            slot.evictable = False
            self._evictable_bytes -= slot.taken_bytes
        self._free(slot)

    def _free(self, slot: Slot) -> None:
        """Free the bytes of a slot that is no entry any more, unless they are being read."""
        if not slot.pins:
            self._extents.free(slot.extents)

    def _end_write(self, client: Client, number: int) -> Slot:
        slot = client.writes.pop(number)
        client.begun_bytes -= slot.counted_bytes
        self._end_writing(slot)
        return slot

    def _end_writing(self, slot: Slot) -> None:
        if self._writing.get(slot.digest) is slot:
            del self._writing[slot.digest]

    def _end_claim(self, digest: bytes) -> None:
        self._claims.pop(digest).client.claims.discard(digest)


def pinned_bytes(clients: Sequence[Client]) -> int:
    """Return the bytes that clients have pinned; an entry with several pins counts once."""
    slots = {id(slot): slot for client in clients for slot, _ in client.pins.values()}
    return sum(slot.taken_bytes for slot in slots.values())
