"""Messages between the server of an arena and its clients, over a Unix socket or TCP.

A message is its length, 4 bytes little-endian, and a MessagePack array: the name of its type and
its fields (https://msgspec.dev). Every request but `Unpin` has one reply, in the order of the
requests. A client that sends anything else is disconnected.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, get_args

import msgspec

from ec_store.arena.extents import Extent
from ec_store.base import LONGEST_S, MemoryStats
from ec_store.entry import MAX_HEADER_BYTES
from ec_store.keys import MAX_OWNER_BYTES, MAX_PART_BYTES

VERSION = 5
"""Version of these messages. A server and a client of different versions refuse each other."""

MAX_KEYS = 4096
"""Upper bound of the keys in one request, and of the rows in one page of a listing."""

MAX_REQUEST_BYTES = 2 * 2**20
"""Upper bound of a request: the header of an entry may take 1 MiB."""

MAX_REPLY_BYTES = 64 * 2**20
"""Upper bound of a reply, which is 16 KiB for each of `MAX_KEYS` entries."""

LENGTH_BYTES = 4

MAX_KEY_CHARACTERS = 512
"""Upper bound of the key in a `Hello`."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_S)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Digests = Annotated[list[Digest], msgspec.Meta(max_length=MAX_KEYS)]
Header = Annotated[bytes, msgspec.Meta(max_length=MAX_HEADER_BYTES + 8)]
Name = Annotated[bytes, msgspec.Meta(max_length=MAX_PART_BYTES)]
RegisteredName = Annotated[bytes, msgspec.Meta(max_length=4096)]
"""Model or namespace of a registration; a reply has those of all models."""
Owner = Annotated[bytes, msgspec.Meta(max_length=MAX_OWNER_BYTES)]
Secret = Annotated[str, msgspec.Meta(max_length=MAX_KEY_CHARACTERS)]

Role = Literal["proxy", "reader", "writer"]

R = TypeVar("R", bound="Message")


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Request of a client, or reply of the server, as an array."""


class ArenaRequest(Message, Generic[R], frozen=True):
    """Request of a client, which has a reply of this type."""

    reply_type: ClassVar[type[Message]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        [cls.reply_type] = get_args(cls.__orig_bases__[0])  # type: ignore[attr-defined]


class Welcome(Message, frozen=True):
    """Reply to `Hello`, which carries the memory's descriptor unless the client is a proxy.

    Attributes:
        arena: random name of the memory.
        session: random number of this connection, which no other client knows.
        size_bytes: size of the memory.
        segment_bytes: no extent crosses a multiple of it.
        address: URL by which proxies of other hosts reach the server; empty: they do not.
        tier: digest of the shared tier's URL; empty: there is none.
    """

    arena: bytes
    session: int
    size_bytes: int
    segment_bytes: int
    address: str = ""
    tier: str = ""


class Headers(Message, frozen=True):
    """Header of each entry; empty for a miss. An entry that comes from the tier has one."""

    headers: list[bytes]


class Pin(msgspec.Struct, array_like=True, frozen=True):
    """Pinned entry; number 0: a miss.

    With number 0 and a header, it is coming from the tier: a later `Read` pins it, or has no header
    because it did not come.

    Attributes:
        checksum: xxh3-64 of its payload; empty: none yet (`ec_store/arena/checksums.py`).
    """

    number: int
    header: bytes
    extents: list[Extent]
    checksum: str = ""


class Pins(Message, frozen=True):
    """Pin of each entry."""

    pins: list[Pin]


class Begun(Message, frozen=True):
    """Place of an entry to write, until `End`; or number 0, and the value of a `Refusal`."""

    number: int
    extents: list[Extent]
    refusal: str = ""


class Done(Message, frozen=True):
    """Result of a request that has no other one."""

    number: int = 0


class Claimed(Message, frozen=True):
    """For each key whether the owner holds its claim; with `find` also the headers."""

    claims: list[bool]
    headers: list[bytes]


class Row(msgspec.Struct, array_like=True, frozen=True):
    """Entry of a listing; `idle_s` is the time since its last use."""

    digest: Digest
    header: bytes
    taken_bytes: int
    idle_s: float


class Page(Message, frozen=True):
    """Rows of a listing; empty: it has ended."""

    rows: list[Row]


class NamespaceList(Message, frozen=True, tag="Namespaces"):
    """Registered namespace of each model."""

    namespaces: dict[bytes, bytes]


class TierStats(msgspec.Struct, array_like=True):
    """Numbers of a tier, since the server has started.

    Each is a metric `ec_store_tier_<name>`, which `ec_store.service` describes.
    """

    hits: int = 0
    misses: int = 0
    skipped: int = 0
    late: int = 0
    claims: int = 0
    claimed_elsewhere: int = 0
    claimed_alone: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    sent: int = 0
    sent_bytes: int = 0
    known: int = 0
    drops: int = 0
    errors: int = 0
    corrupt: int = 0
    queued: int = 0
    queued_bytes: int = 0
    found_corrupt: int = 0
    skips_lookups: int = 0
    skips_waiting: int = 0
    skips_reads: int = 0
    skips_writes: int = 0


class Stats(Message, frozen=True):
    """Numbers of a memory.

    Attributes:
        taken_bytes: bytes that are not free.
        leased: number of leased entries.
        tiers: numbers of each tier, by its name.
    """

    entries: int
    taken_bytes: int
    size_bytes: int
    evictions: int
    leased: int
    memory: MemoryStats
    tiers: dict[str, TierStats]


class Failed(Message, frozen=True):
    """The request cannot be served, and the server ends the connection."""

    text: str


class Hello(ArenaRequest[Welcome], frozen=True):
    """First request of a connection.

    Attributes:
        role: `reader` gets a read-only descriptor of the memory, `writer` one to write,
            and `proxy` none.
        key: key of the server, over TCP; empty on a Unix socket, which its folder protects.
    """

    version: int
    role: Role
    key: Secret = ""


class Forget(ArenaRequest[Done], frozen=True):
    """End all that an earlier connection of this process held: its copies have ended."""

    session: int


class Find(ArenaRequest[Headers], frozen=True):
    """Look entries up. With `seconds` above 0, lease them too.

    If there is a tier, entries that are missing here are looked up there first, and begin to come:
    unless it is a `local` look-up, as proxies ask all hosts at once.
    """

    digests: Digests
    seconds: Seconds = 0.0
    local: bool = False


class Read(ArenaRequest[Pins], frozen=True):
    """Pin entries, so that they are not evicted."""

    digests: Digests


class Unpin(Message, frozen=True):
    """Release pins. It has no reply, so that it can be sent with the next request."""

    numbers: list[int]


class Begin(ArenaRequest[Begun], frozen=True):
    """Begin to write an entry."""

    digest: Digest
    namespace: Name
    size_bytes: Size
    replace: bool


class End(ArenaRequest[Done], frozen=True):
    """End a write; an empty header gives it up. `Done` has 1 if it is stored.

    `encode_s` is as in `Entry`. Servers and clients of this version work without it.
    """

    number: int
    header: Header
    encode_s: Seconds = 0.0


class Discard(ArenaRequest[Done], frozen=True):
    """Delete the entry of a pin, which is corrupt, unless it was replaced."""

    number: int


class Delete(ArenaRequest[Done], frozen=True):
    """Delete entries. `Done` has their number."""

    digests: Digests


class Purge(ArenaRequest[Done], frozen=True):
    """Delete a namespace with its entries. `Done` has their number."""

    namespace: Name


class ClaimKeys(ArenaRequest[Claimed], frozen=True):
    """Claim keys. With `find`, the keys of existing entries are not claimed."""

    digests: Digests
    owner: Owner
    seconds: Seconds
    find: bool = False


class Release(ArenaRequest[Done], frozen=True):
    """Release claims of an owner."""

    digests: Digests
    owner: Owner


class List(ArenaRequest[Page], frozen=True):
    """List entries after this digest, by digest."""

    after: bytes


class Register(ArenaRequest[NamespaceList], frozen=True):
    """Register the namespace of a model; an empty model only asks."""

    model: RegisteredName
    namespace: RegisteredName


class GetStats(ArenaRequest[Stats], frozen=True):
    """Get the statistics. The cost grows with the pins."""


AnyRequest = (
    Hello
    | Forget
    | Find
    | Read
    | Unpin
    | Begin
    | End
    | Discard
    | Delete
    | Purge
    | ClaimKeys
    | Release
    | List
    | Register
    | GetStats
)
Reply = Welcome | Headers | Pins | Begun | Done | Claimed | Page | NamespaceList | Stats | Failed

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class BadMessage(Exception):
    """Raised for bytes that are no message, or a message that is too long."""


def encode(message: Message) -> bytes:
    """Return a message with its length."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def read_request(body: Any) -> AnyRequest:
    """Parse a request without its length. Raise BadMessage if it is none."""
    try:
        return _requests.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(str(error)) from None


def read_reply(body: Any) -> Reply:
    """Parse a reply without its length. Raise BadMessage if it is none."""
    try:
        return _replies.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(str(error)) from None


class Frames:
    """Splitter of a stream of bytes into messages.

    Attributes:
        max_bytes: upper bound of a message.
        rest: beginning of a message that is not complete.
    """

    def __init__(self, max_bytes: int) -> None:
        """Create a splitter of messages of at most this many bytes."""
        self.max_bytes = max_bytes
        self.rest = bytearray()

    def split(self, data: bytes) -> Iterator[bytes]:
        """Yield the messages that are complete with these bytes.

        Raises:
            BadMessage: a message is too long.
        """
        self.rest += data
        while len(self.rest) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self.rest[:LENGTH_BYTES], "little")
            if end > self.max_bytes:
                raise BadMessage(f"a message of {end} bytes, of at most {self.max_bytes}")
            if len(self.rest) < end:
                break
            message = bytes(self.rest[LENGTH_BYTES:end])
            del self.rest[:end]  # constant time: bytearray moves its start
            yield message
