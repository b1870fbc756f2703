"""Arena: its memory, its index, and the reply to each request. It does no I/O and never waits."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ec_store.arena.index import ArenaIndex, Client, Refusal, Slot, pinned_bytes
from ec_store.arena.protocol import (
    MAX_REPLY_BYTES,
    AnyRequest,
    BadMessage,
    Begin,
    Begun,
    Claimed,
    ClaimKeys,
    Delete,
    Discard,
    Done,
    End,
    Find,
    GetStats,
    Headers,
    List,
    NamespaceList,
    Page,
    Pin,
    Pins,
    Purge,
    Read,
    Register,
    Release,
    Reply,
    Row,
    Stats,
    TierStats,
    Unpin,
)
from ec_store.base import ClientUse, MemoryStats

PAGE_ROWS = 256
"""Upper bound of the rows in one page of a listing, each with a header of some hundred bytes."""

PAGE_BYTES = 2**20
"""Bytes of headers after which a page of a listing ends."""

MAX_HEADERS_BYTES = MAX_REPLY_BYTES // 2
"""Upper bound of the headers in one reply."""

USES = 2
"""Uses of an entry on this host after which a tier of this host alone gets it."""

MAX_MODELS = 1024
"""Upper bound of the models with a registered namespace."""


@dataclass(slots=True, eq=False)
class Arena:
    """Entries of a memory and their users.

    Attributes:
        size_bytes: size of the memory.
        pages: kind of its pages.
        refused: number of writes that found no room.
        clients: clients that are connected, by session.
        gone: clients that are gone, the bytes of which a device may still be copying, by session.
        namespaces: registered namespace of each model.
        own: what the server itself has pinned or begun, for the tier.
        coming: entries that are being copied from the tier, by digest. They have a header already,
            and may be leased.
        tiers: functions that return the numbers of each tier, by its name.
    """

    index: ArenaIndex
    size_bytes: int
    pages: str = ""
    refused: int = 0
    clients: dict[int, Client] = field(default_factory=dict)
    gone: dict[int, Client] = field(default_factory=dict)
    namespaces: dict[bytes, bytes] = field(default_factory=dict)
    own: Client = field(default_factory=Client)
    coming: dict[bytes, Slot] = field(default_factory=dict)
    tiers: dict[str, Callable[[], TierStats]] = field(default_factory=dict)
    _offer: Callable[[Slot], None] | None = None
    _offer_every_s: float = 0.0

    def watch_uses(self, offer: Callable[[Slot], None], every_s: float) -> None:
        """Call `offer` for each entry at its second use, and once in `every_s` at later ones.

        A lease counts twice: it is that of a request which has found the entry. A read may be that
        of the request for which it was encoded.
        """
        self._offer, self._offer_every_s = offer, every_s

    def note_offer(self, slot: Slot, now_s: float) -> None:
        """Note that a tier of this host gets or has an entry."""
        slot.uses, slot.offered_s = USES, now_s

    def answer(  # noqa: C901, PLR0911, PLR0912 - one case for each request
        self,
        client: Client,
        request: AnyRequest,
        now_s: float,
        claimed_elsewhere: Collection[bytes] = (),
    ) -> Reply | None:
        """Return the reply to a request of a client; None if it has none.

        Keys of `claimed_elsewhere` are claimed by owners on other hosts.

        Raises:
            BadMessage: no client of this protocol sends this request at this time.
        """
        index = self.index
        match request:
            case Find(digests, 0):
                return Headers(self._headers(digests, index.find(digests, now_s)))
            case Find(digests, seconds):
                for digest in digests:
                    if coming := self.coming.get(digest):
                        coming.leased_until_s = max(coming.leased_until_s, now_s + seconds)
                slots = index.lease(digests, seconds, now_s)
                self._count_uses(slots, USES, now_s)
                return Headers(self._headers(digests, slots))
            case Unpin(numbers):
                index.unpin(client, numbers, now_s)
                return None
            case Read(digests):
                pins = index.pin(client, digests, now_s)
                slots = [None if pin is None else pin[1] for pin in pins]
                self._count_uses(slots, 1, now_s)
                headers = self._headers(digests, slots)
                return Pins(list(map(_pin, pins, headers)))
            case Begin(digest, namespace, size_bytes, replace):
                slot = Slot(digest, namespace, size_bytes, replace)
                number = index.begin(client, slot, now_s)
                if isinstance(number, Refusal):
                    self.refused += number is Refusal.FULL
                    return Begun(0, [], number.value)
                return Begun(number, list(slot.extents))
            case End():
                return self._end(client, request, now_s)
            case Discard(number):
                return Done(int(index.discard(client, number)))
            case Delete(digests):
                return Done(index.delete(digests))
            case Purge(namespace):
                for model in [m for m, name in self.namespaces.items() if name == namespace]:
                    del self.namespaces[model]
                return Done(index.purge(namespace))
            case ClaimKeys():
                return self._claim(client, request, now_s, claimed_elsewhere)
            case Release(digests, owner):
                index.release(digests, owner)
                return Done()
            case List(after):
                return self._page(after, now_s)
            case Register(model, namespace):
                return self._register(model, namespace)
            case GetStats():
                return self._stats(now_s)
            case _:
                raise BadMessage(f"an unexpected {type(request).__name__}")

    def _end(self, client: Client, end: End, now_s: float) -> Done:
        number, header, encode_s = end.number, end.header, end.encode_s
        try:
            if header:
                return Done(int(self.index.commit(client, number, header, now_s, encode_s)))
            self.index.abort(client, number)
        except KeyError:
            raise BadMessage("it ends a write that it has not begun") from None
        return Done()

    def _claim(
        self, client: Client, request: ClaimKeys, now_s: float, elsewhere: Collection[bytes]
    ) -> Claimed:
        digests, owner, seconds = request.digests, request.owner, request.seconds
        headers: list[bytes] = []
        found: set[bytes] = set()
        if request.find:
            headers = self._headers(digests, self.index.find(digests, now_s))
            found = {digest for digest, header in zip(digests, headers, strict=True) if header}
        claimed = [each for each in digests if each not in found and each not in elsewhere]
        claims = self.index.claim(client, claimed, owner, seconds, now_s)
        by_digest = dict(zip(claimed, claims, strict=True))
        return Claimed([by_digest.get(digest, False) for digest in digests], headers)

    def _count_uses(self, slots: Iterable[Slot | None], uses: int, now_s: float) -> None:
        if self._offer is None:
            return
        before_s = now_s - self._offer_every_s
        for slot in slots:
            if slot is not None and slot.offered_s < before_s:
                slot.uses += uses
                if slot.uses >= USES:
                    slot.offered_s = now_s
                    self._offer(slot)

    def _headers(self, digests: Sequence[bytes], slots: Sequence[Slot | None]) -> list[bytes]:
        """Return the header of each entry, also of those that come from the tier.

        Raises:
            BadMessage: they are too large for a reply.
        """
        headers = []
        for digest, slot in zip(digests, slots, strict=True):
            found = self.coming.get(digest) if slot is None else slot
            headers.append(b"" if found is None else found.header)
        if sum(map(len, headers)) > MAX_HEADERS_BYTES:
            raise BadMessage(f"the headers of these {len(headers)} entries do not fit into a reply")
        return headers

    def _page(self, after: bytes, now_s: float) -> Page:
        rows: list[Row] = []
        left_bytes = PAGE_BYTES
        for slot in self.index.slots_after(after, PAGE_ROWS):
            if left_bytes <= 0:
                break
            left_bytes -= len(slot.header)
            rows.append(Row(slot.digest, slot.header, slot.taken_bytes, now_s - slot.used_s))
        return Page(rows)

    def _register(self, model: bytes, namespace: bytes) -> NamespaceList:
        if model:
            for name in (model, namespace):  # clients decode them, each those of all others
                try:
                    name.decode("utf-8", "surrogatepass")
                except UnicodeDecodeError as error:
                    raise BadMessage(f"it registers a name that is not UTF-8: {error}") from None
            self.namespaces[model] = namespace
            while len(self.namespaces) > MAX_MODELS:
                del self.namespaces[next(iter(self.namespaces))]
        return NamespaceList(self.namespaces)

    def _stats(self, now_s: float) -> Stats:
        gone = self.gone.values()
        clients = [*self.clients.values(), *gone, self.own]
        leased = self.index.leased(now_s)
        pins = [pinned_s for client in clients for _, pinned_s in client.pins.values()]
        memory = MemoryStats(
            pages=self.pages,
            clients=len(self.clients),
            pinned_bytes=pinned_bytes(clients),
            leased_bytes=sum(slot.taken_bytes for slot in leased),
            begun_bytes=sum(client.begun_bytes for client in clients),
            gone_bytes=sum(client.pinned_bytes + client.begun_bytes for client in gone),
            oldest_pin_s=now_s - min(pins, default=now_s),
            refused=self.refused,
            uses=_uses(clients),
            saved_s=self.index.saved_s,
            evicts_by="worth" if self.index.trial.by_worth else "least use",
        )
        return Stats(
            len(self.index),
            self.index.taken_bytes,
            self.size_bytes,
            self.index.evictions,
            len(leased),
            memory,
            {name: read() for name, read in self.tiers.items()},
        )


def _uses(clients: Sequence[Client]) -> list[ClientUse]:
    """Return what the processes hold that hold anything; a process has several connections."""
    processes: defaultdict[tuple[int, str], list[Client]] = defaultdict(list)
    for client in clients:
        if client.pins or client.writes:
            processes[client.pid, client.role].append(client)
    return [
        ClientUse(pid, role, pinned_bytes(group), sum(client.begun_bytes for client in group))
        for (pid, role), group in processes.items()
    ]


def _pin(pin: tuple[int, Slot] | None, header: bytes) -> Pin:
    if pin is None:
        return Pin(0, header, [])
    number, slot = pin
    return Pin(number, header, list(slot.extents), slot.checksum)
