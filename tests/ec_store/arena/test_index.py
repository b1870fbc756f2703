"""The index beside a model of it: what each client holds, and which entries there must be."""

import random
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ec_store.arena.extents import PAGE_BYTES, Extent, ExtentAllocator
from ec_store.arena.index import (
    ENTRY_BYTES,
    MAX_CLAIMS,
    MAX_UNHASHED,
    MIN_INDEX_BYTES,
    ArenaIndex,
    Client,
    Refusal,
    Slot,
)
from tests.examples import scaled

PAGES = 12
CLIENT_PAGES = 8
TTL_S = 100.0
STEPS = 300
DIGESTS = [bytes([n]) * 32 for n in range(6)]
OWNERS = [b"a", b"b"]


@dataclass(eq=False)
class Held:
    """Pin or begun write of a client; its bytes must not be given to another write.

    `gone` is whether the pinned entry was deleted or replaced.
    """

    client: Client
    number: int
    digest: bytes
    extents: tuple[Extent, ...]
    gone: bool = False


class Walk:
    """Random calls, each of which is checked against what the calls before it must have left."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now_s = 0.0
        self.extents = ExtentAllocator(PAGES * PAGE_BYTES, 5 * PAGE_BYTES)
        self.index = ArenaIndex(self.extents, client_bytes=CLIENT_PAGES * PAGE_BYTES, ttl_s=TTL_S)
        self.clients = [Client() for _ in range(3)]
        self.pins: list[Held] = []
        self.writes: list[Held] = []
        self.leased: dict[bytes, float] = {}
        self.claims: dict[bytes, tuple[Client, bytes, float]] = {}

    def step(self) -> None:
        """Make one call; the more usual ones more often."""
        calls = [self.begin, self.end, self.pin, self.unpin, self.claim, self.pass_time]
        rare = [self.lease, self.delete, self.expire, self.release, self.leave]
        self.index.trial.by_worth = self.rng.random() < 0.8
        self.rng.choice(calls * 4 + rare)()
        self.check()

    def there(self, digest: bytes) -> Slot | None:
        return self.index.find([digest], self.now_s)[0]

    def begin(self) -> None:
        client, digest = self.rng.choice(self.clients), self.rng.choice(DIGESTS)
        pages, replaces = self.rng.randint(1, CLIENT_PAGES + 1), self.rng.random() < 0.3
        existed = self.there(digest) is not None
        begun = any(held.digest == digest for held in self.writes if not self.replaces(held))
        slot = Slot(digest, b"namespace", pages * PAGE_BYTES, replaces)
        protected, evictions = self.protected_pages(), self.index.evictions
        number = self.index.begin(client, slot, self.now_s)
        if not replaces and (existed or begun):
            assert number is (Refusal.THERE if existed else Refusal.BEGUN)
        elif pages > CLIENT_PAGES:
            assert number is Refusal.TOO_LARGE
        elif isinstance(number, Refusal):
            own = sum(len(pages_of(held.extents)) for held in self.writes if held.client is client)
            assert number is Refusal.FULL
            assert self.index.evictions == evictions
            assert PAGES - len(protected) < pages or own + pages > CLIENT_PAGES
        else:
            assert not pages_of(slot.extents) & protected
            assert len(pages_of(slot.extents)) == pages
            self.writes.append(Held(client, number, digest, slot.extents))

    def end(self) -> None:
        if not self.writes:
            return
        held = self.writes.pop(self.rng.randrange(len(self.writes)))
        replaces, old = self.replaces(held), self.there(held.digest)
        if self.rng.random() < 0.2:
            self.index.abort(held.client, held.number)
            assert self.there(held.digest) is old
        else:
            encode_s = self.rng.choice([0.0, 0.1, 5.0])
            stored = self.index.commit(held.client, held.number, b"header", self.now_s, encode_s)
            assert stored is (old is None or replaces)
            if stored:
                slot = self.there(held.digest)
                assert slot is not None
                assert (slot.extents, slot.header) == (held.extents, b"header")
                self.forget_pins(held.digest)

    def pin(self) -> None:
        client, digest = self.rng.choice(self.clients), self.rng.choice(DIGESTS)
        slot = self.there(digest)
        [pin] = self.index.pin(client, [digest], self.now_s)
        if slot is None:
            assert pin is None
        elif client.pinned_bytes + slot.size_bytes > CLIENT_PAGES * PAGE_BYTES:
            assert pin is None or client.pinned_bytes <= CLIENT_PAGES * PAGE_BYTES
        else:
            assert pin is not None
        if pin is not None:
            self.pins.append(Held(client, pin[0], digest, pin[1].extents))

    def unpin(self) -> None:
        if self.pins:
            held = self.pins.pop(self.rng.randrange(len(self.pins)))
            self.index.unpin(held.client, [held.number, 10**9], self.now_s)

    def lease(self) -> None:
        digest, seconds = self.rng.choice(DIGESTS), self.rng.uniform(0, 1.5 * TTL_S)
        slot = self.there(digest)
        assert self.index.lease([digest], seconds, self.now_s) == [slot]
        if slot is not None:
            self.leased[digest] = max(self.leased.get(digest, 0.0), self.now_s + seconds)

    def delete(self) -> None:
        digest = self.rng.choice(DIGESTS)
        existed = self.there(digest) is not None
        assert self.index.delete([digest, digest]) == existed
        assert self.there(digest) is None
        self.leased.pop(digest, None)
        self.forget_pins(digest)

    def expire(self) -> None:
        self.index.expire(self.now_s)
        for slot in self.index.slots():
            used = any(held.extents == slot.extents for held in self.pins)
            assert used or slot.leased_until_s > self.now_s or self.now_s < slot.used_s + TTL_S

    def claim(self) -> None:
        client, digest = self.rng.choice(self.clients), self.rng.choice(DIGESTS)
        owner = self.rng.choice(OWNERS)
        seconds = self.rng.uniform(0, 30)
        _, holder, until_s = self.claims.get(digest, (client, owner, 0.0))
        free = until_s <= self.now_s or holder == owner
        assert self.index.claim(client, [digest], owner, seconds, self.now_s) == [free]
        if free:
            self.claims[digest] = (client, owner, self.now_s + seconds)

    def release(self) -> None:
        digest, owner = self.rng.choice(DIGESTS), self.rng.choice(OWNERS)
        self.index.release([digest], owner)
        if self.claims.get(digest, (None, None))[1] == owner:
            del self.claims[digest]

    def pass_time(self) -> None:
        self.now_s += self.rng.choice([0.0, 1.0, 1.0, 20.0])

    def leave(self) -> None:
        client = self.rng.choice(self.clients)
        self.index.disconnect(client)
        self.claims = {key: claim for key, claim in self.claims.items() if claim[0] is not client}
        self.check()  # a device may still be copying what it held
        self.index.forget(client, self.now_s)
        self.pins = [held for held in self.pins if held.client is not client]
        self.writes = [held for held in self.writes if held.client is not client]
        assert not client.pins
        assert not client.writes
        self.clients[self.clients.index(client)] = Client()

    def check(self) -> None:
        """Check that what is in use is not free, and that no page is lost."""
        self.index._end_leases(self.now_s)  # noqa: SLF001
        evictable = [slot for slot in self.index.slots() if not slot.is_in_use(self.now_s)]
        assert self.index._evictable_bytes == sum(slot.taken_bytes for slot in evictable)  # noqa: SLF001
        free = pages_of(self.extents.holes())
        entries = {page for slot in self.index.slots() for page in pages_of(slot.extents)}
        in_use = {page for held in self.pins + self.writes for page in pages_of(held.extents)}
        assert not free & (entries | in_use)
        assert free | entries | in_use == set(range(PAGES))
        for digest, until_s in self.leased.items():
            assert until_s <= self.now_s or self.there(digest) is not None
        for held in self.pins:
            if not held.gone:
                slot = self.there(held.digest)
                assert slot is not None
                assert slot.extents == held.extents
        for client in self.clients:
            pinned = [held for held in self.pins if held.client is client]
            begun = [held for held in self.writes if held.client is client]
            assert client.pinned_bytes == PAGE_BYTES * sum(len(pages_of(h.extents)) for h in pinned)
            assert client.begun_bytes == PAGE_BYTES * sum(len(pages_of(h.extents)) for h in begun)
            assert client.pinned_bytes <= CLIENT_PAGES * PAGE_BYTES

    def forget_pins(self, digest: bytes) -> None:
        for held in self.pins:
            held.gone |= held.digest == digest

    def replaces(self, held: Held) -> bool:
        return held.client.writes[held.number].replaces

    def protected_pages(self) -> set[int]:
        """Return the pages that no write may get now."""
        protected = {page for held in self.pins + self.writes for page in pages_of(held.extents)}
        for digest, until_s in self.leased.items():
            if until_s > self.now_s and (slot := self.there(digest)):
                protected |= pages_of(slot.extents)
        return protected


def pages_of(extents: Iterable[Extent]) -> set[int]:
    return {
        page
        for offset, size_bytes in extents
        for page in range(offset // PAGE_BYTES, (offset + size_bytes) // PAGE_BYTES)
    }


@settings(max_examples=scaled(60))
@given(seed=st.integers(0, 2**32))
def test_the_index_does_what_a_model_of_it_does(seed: int) -> None:
    walk = Walk(random.Random(seed))  # noqa: S311
    for _ in range(STEPS):
        walk.step()


def put(index: ArenaIndex, client: Client, digest: bytes, now_s: float) -> None:
    number = index.begin(client, Slot(digest, b"", PAGE_BYTES), now_s)
    assert isinstance(number, int)
    assert index.commit(client, number, b"header", now_s)


def test_a_renewed_lease_takes_no_further_memory() -> None:
    index, client = ArenaIndex(ExtentAllocator(3 * PAGE_BYTES, 2**20)), Client()
    put(index, client, DIGESTS[0], 0)
    for second in range(100):
        index.lease([DIGESTS[0]], 60, second)

    assert len(index.leased(100)) == 1
    assert len(index.leased(158)) == 1
    assert len(index.leased(159)) == 0


def test_an_entry_is_leased_again_after_its_lease_and_until_it_is_removed() -> None:
    index, client = ArenaIndex(ExtentAllocator(2 * PAGE_BYTES, 2**20)), Client()
    put(index, client, DIGESTS[0], 0)
    index.lease([DIGESTS[0]], 1, 0)
    assert not index.leased(2)
    index.lease([DIGESTS[0]], 60, 3)
    assert [slot.digest for slot in index.leased(4)] == [DIGESTS[0]]

    put(index, client, DIGESTS[1], 4)
    put(index, client, DIGESTS[2], 5)
    assert [*map(bool, index.find(DIGESTS[:3], 6))] == [True, False, True]
    index.delete([DIGESTS[0]])
    assert not index.leased(7)


def test_the_least_recently_used_entry_is_evicted() -> None:
    index = ArenaIndex(ExtentAllocator(3 * PAGE_BYTES, 2**20))
    index.trial.by_worth = False
    client = Client()
    for now_s, digest in enumerate(DIGESTS[:3]):
        put(index, client, digest, now_s)
    assert index.begin(client, Slot(DIGESTS[0], b"", 1), 3) is Refusal.THERE  # counts as a use
    [pin] = index.pin(client, [DIGESTS[1]], 4)
    assert pin is not None
    put(index, client, DIGESTS[3], 5)
    index.unpin(client, [pin[0]], 6)
    put(index, client, DIGESTS[4], 7)

    assert [slot.digest for slot in index.slots()] == [DIGESTS[3], DIGESTS[1], DIGESTS[4]]
    assert index.evictions == 2


def test_an_entry_waits_for_its_checksum_from_its_write_or_a_later_pin_on() -> None:
    index, client = ArenaIndex(ExtentAllocator((MAX_UNHASHED + 2) * PAGE_BYTES, 2**30)), Client()
    digests = [n.to_bytes(32) for n in range(MAX_UNHASHED + 1)]
    for digest in digests:
        put(index, client, digest, 0)
    waiting = list(index.unhashed)
    assert [slot.digest for slot in waiting] == digests[:-1]

    index.delete(digests[:1])
    waiting[1].checksum = "computed"
    del index.unhashed[waiting[1]]
    index.pin(client, digests[1:], 0)
    assert [slot.digest for slot in index.unhashed] == digests[2:]


def test_pages_contain_every_entry_once_by_digest() -> None:
    index, client = ArenaIndex(ExtentAllocator(2**30, 2**30)), Client()
    rng = random.Random(1)  # noqa: S311
    digests = [bytes([rng.choice([0, 7, 7, 255])]) + rng.randbytes(31) for _ in range(200)]
    for digest in digests:
        put(index, client, digest, 0)
    index.delete(digests[100:])
    found: list[bytes] = []
    while page := index.slots_after(found[-1] if found else b"", 7):
        assert len(page) <= 7
        found += [slot.digest for slot in page]

    assert found == sorted(digests[:100])


def test_long_headers_evict_entries_before_the_index_takes_too_much_memory() -> None:
    index, client = ArenaIndex(ExtentAllocator(2**28, 2**28)), Client()
    header = bytes(2**20 - ENTRY_BYTES)
    fitting = MIN_INDEX_BYTES // 2**20 + 1  # the bound is checked before an entry is written
    for n in range(3 * fitting):
        number = index.begin(client, Slot(n.to_bytes(32), b"", 1), 0)
        assert isinstance(number, int)
        index.commit(client, number, header, 0)
    assert len(index) == fitting

    index.lease([slot.digest for slot in index.slots()], 60, 0)
    assert index.begin(client, Slot(b"new" * 10 + b"12", b"", 1), 0) is Refusal.FULL
    index.delete([slot.digest for slot in index.slots()])
    assert isinstance(index.begin(client, Slot(b"new" * 10 + b"12", b"", 1), 0), int)


@pytest.mark.parametrize("entries", [10, 1000])
@pytest.mark.parametrize("use", ["lease", "pin"])
def test_a_memory_in_use_refuses_a_write_without_looking_at_its_entries(
    entries: int, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, client = ArenaIndex(ExtentAllocator(entries * PAGE_BYTES, 2**30)), Client()
    digests = [n.to_bytes(32) for n in range(entries)]
    for digest in digests:
        put(index, client, digest, 0)
    pins = index.pin(client, digests, 0) if use == "pin" else index.lease(digests, 60, 0)
    calls = 0
    is_in_use = Slot.is_in_use

    def counting(slot: Slot, now_s: float) -> bool:
        nonlocal calls
        calls += 1
        return is_in_use(slot, now_s)

    monkeypatch.setattr(Slot, "is_in_use", counting)
    new = Slot(b"n" * 32, b"", PAGE_BYTES)

    assert index.begin(client, new, 1) is Refusal.FULL
    assert calls == 0
    if use == "pin":
        index.unpin(client, [pin[0] for pin in pins if isinstance(pin, tuple)][:1], 2)
    assert isinstance(index.begin(client, new, 60), int)


def test_an_entry_without_payload_counts_as_a_page_of_its_client() -> None:
    index = ArenaIndex(ExtentAllocator(2**20, 2**20), client_bytes=2 * PAGE_BYTES)
    client = Client()
    numbers = [index.begin(client, Slot(digest, b"", 0), 0) for digest in DIGESTS[:3]]
    assert numbers[2] is Refusal.FULL
    assert client.begun_bytes == 2 * PAGE_BYTES
    for number in numbers[:2]:
        assert isinstance(number, int)
        index.commit(client, number, b"header", 0)
    put(index, client, DIGESTS[2], 0)

    pins = index.pin(client, DIGESTS[:3], 0)
    assert [pin is None for pin in pins] == [False, False, True]


def test_the_claims_of_one_client_are_bounded() -> None:
    index = ArenaIndex(ExtentAllocator(PAGE_BYTES, 2**20))
    client, other = Client(), Client()
    digests = [n.to_bytes(32) for n in range(MAX_CLAIMS + 1)]

    assert index.claim(client, digests, b"a", 60, 0.0) == [True] * MAX_CLAIMS + [False]
    assert index.claim(client, digests[:1], b"a", 60, 1.0) == [True]
    assert index.claim(other, digests[-1:], b"b", 60, 1.0) == [True]
    index.release(digests[:1], b"a")
    assert index.claim(client, digests[-1:], b"a", 60, 1.0) == [False]
    assert index.claim(client, digests[:1], b"a", 60, 1.0) == [True]


def test_entries_expire_in_the_order_of_their_last_use() -> None:
    index = ArenaIndex(ExtentAllocator(3 * PAGE_BYTES, 2**20), ttl_s=10)
    client = Client()
    for now_s, digest in enumerate(DIGESTS[:3]):
        number = index.begin(client, Slot(digest, b"", PAGE_BYTES), now_s)
        assert isinstance(number, int)
        index.commit(client, number, b"header", now_s)
    index.lease([DIGESTS[0]], 25, 3)
    [pin] = index.pin(client, [DIGESTS[1]], 3)
    assert pin is not None
    index.unpin(client, [pin[0]], 20)

    left = []
    for now_s in (21, 28, 30):
        index.expire(now_s)
        left.append([slot.digest for slot in index.slots()])
    assert left == [DIGESTS[:2], DIGESTS[1:2], []]
