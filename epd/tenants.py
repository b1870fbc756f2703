"""Tenants: their API keys, the scope within which they share cache entries, and their use.

The proxy stores only the SHA-256 of a key, in memory as in the keys file.
"""

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
LINE = re.compile(rf"({NAME.pattern})\s*:\s*([0-9A-Fa-f]{{64}})")
KEY = re.compile(r"[!-~]{16,512}")
"""Valid keys: an Authorization header can carry them, and they are too long to guess."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of one or more API keys."""

    name: str

    def __hash__(self) -> int:
        # A str caches its hash, and each request looks up its tenant several times.
        return hash(self.name)


ANONYMOUS = Tenant("")
"""The tenant of every client if no keys are configured. No line of a keys file can name it."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The scope in which a request's keys and salts are derived: equal scopes share cache entries.

    Attributes:
        tenant: None if all tenants share entries.
        secret: known to the proxies alone; may be empty.
    """

    tenant: Tenant | None = None
    secret: bytes = field(default=b"", repr=False)


class KeysInvalid(ValueError):
    """A keys file is invalid. The message quotes no part of the file, which could be a key."""


class ApiKeys:
    """The valid keys, by their SHA-256."""

    def __init__(self, tenants: Mapping[bytes, Tenant]) -> None:
        self._tenants = dict(tenants)

    def replace(self, others: "ApiKeys") -> None:
        """Replace all keys by those of another object."""
        self._tenants = others._tenants  # noqa: SLF001 - of this class

    def tenant_of(self, key: str) -> Tenant | None:
        """Return the tenant of a key, or None for an unknown key.

        The lookup uses the digest, so its cost does not depend on the number of keys. Its duration
        may depend on the digest but reveals nothing about the valid keys: a client chooses only the
        text that is hashed, not the digest.
        """
        return self._tenants.get(_sha256(key))


def parse_keys(raw: bytes) -> ApiKeys:
    """Parse a keys file: lines `tenant:sha256`; `#` starts a comment line.

    Raises:
        KeysInvalid: a line is invalid or repeats a key, or the file has no key.
    """
    tenants: dict[bytes, Tenant] = {}
    for number, line in enumerate(raw.splitlines(), 1):
        stripped = line.decode("utf-8", "replace").strip()
        if not stripped or stripped.startswith("#"):
            continue
        parsed = LINE.fullmatch(stripped)
        if parsed is None:
            raise KeysInvalid(
                f"line {number} is not tenant:sha256 as `epd hash-key` prints it "
                "(a tenant's name has up to 64 of A-Z a-z 0-9 . _ -)"
            )
        key = bytes.fromhex(parsed[2])
        if key in tenants:
            raise KeysInvalid(f"line {number} repeats the key of a line above")
        tenants[key] = Tenant(parsed[1])
    if not tenants:
        raise KeysInvalid("the file has no key; add a line that `epd hash-key` prints")
    return ApiKeys(tenants)


def new_key() -> str:
    """Return a new key with 256 random bits."""
    return f"epd-{secrets.token_urlsafe(32)}"


def key_line(tenant: str, key: str) -> str:
    """Return the line of a keys file that assigns `key` to the tenant.

    Raises:
        ValueError: the tenant's name or the key is invalid.
    """
    if NAME.fullmatch(tenant) is None:
        raise ValueError("a tenant's name has up to 64 of A-Z a-z 0-9 . _ -")
    if KEY.fullmatch(key) is None:
        raise ValueError("a key has 16 to 512 printable ASCII characters and no space")
    return f"{tenant}:{_sha256(key).hex()}"


def _sha256(key: str) -> bytes:
    # Header bytes that are not UTF-8 arrive as surrogates.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


MINUTE_S = 60.0
ROUNDING_S = 1e-6
"""Tolerance for times on the clock, in seconds."""


@dataclass(slots=True, eq=False)
class TenantUse:
    """Requests and bytes of one tenant in this process.

    Attributes:
        requests: number of requests that are admitted or queued.
        body_bytes: bytes of the bodies of these requests.
        full_at_s: time at which the tenant's bucket will be full, on the monotonic clock.
    """

    requests: int = 0
    body_bytes: int = 0
    full_at_s: float = 0.0

    def begin_request(self) -> None:
        self.requests += 1

    def end_request(self) -> None:
        self.requests -= 1

    def total_requests(self) -> int:
        """Return the number of the tenant's requests in all workers."""
        return self.requests

    def latest_full_at_s(self) -> float:
        """Return the latest `full_at_s` of all workers."""
        return self.full_at_s

    def set_full_at_s(self, full_at_s: float) -> None:
        self.full_at_s = full_at_s


MAX_SHARED = 16384
"""Upper bound of the tenants with shared counts. Each worker counts further ones alone."""


class LedgerRow:
    """Counts of one worker in shared memory: one slot per tenant. Only that worker writes it.

    Attributes:
        keys: digests of the tenants' names; 0 for a free slot.
        requests: their requests.
        full_at_s: when their buckets will be full.
    """

    BYTES = 3 * 8 * MAX_SHARED
    """Size of a row in shared memory."""

    def __init__(self, memory: memoryview) -> None:
        size = 8 * MAX_SHARED
        self.keys = memory[:size].cast("Q")
        self.requests = memory[size : 2 * size].cast("q")
        self.full_at_s = memory[2 * size : 3 * size].cast("d")

    def find_slot(self, key: int, first: int = 0) -> int:
        """Return the first slot from `first` on that is free or has a key; else `MAX_SHARED`."""
        for slot in range(first, MAX_SHARED):
            found = self.keys[slot]
            if found == key or not found:
                return slot
        return MAX_SHARED


class TenantLedger:
    """Counts of tenants in memory that all workers share.

    A worker writes its count before it reads those of the others. So workers that admit at the same
    moment see each other. If their requests together exceed the limit, all of these are rejected.
    Processors may delay a write behind a read by nanoseconds: within that time, each worker may
    admit one request too many.
    """

    def __init__(self, memory: memoryview, workers: int) -> None:
        size = LedgerRow.BYTES
        self._rows = [LedgerRow(memory[size * row : size * (row + 1)]) for row in range(workers)]

    @staticmethod
    def size_bytes(workers: int) -> int:
        """Return the size of the memory, of which only the slots in use are touched."""
        return LedgerRow.BYTES * workers

    def use_of(self, worker: int, name: str) -> TenantUse:
        """Return the use of a tenant in a worker, which is numbered from 0.

        The first call for a tenant in a worker is O(tenants of that worker).
        """
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        key, row = int.from_bytes(digest) | 1, self._rows[worker]
        slot = row.find_slot(key)
        if slot == MAX_SHARED:
            return TenantUse()
        row.keys[slot] = key
        others = [SlotReader(other, key) for other in self._rows if other is not row]
        return SharedUse(row, slot, others)

    def forget_requests(self, worker: int) -> None:
        """Remove the requests of a worker that has died. Its rates stay."""
        row = self._rows[worker]
        for slot in range(row.find_slot(0)):
            row.requests[slot] = 0


@dataclass(slots=True, eq=False)
class SlotReader:
    """Slot of a tenant in the row of another worker, once that worker has one."""

    _row: LedgerRow
    _key: int
    _slot: int = 0
    _found: bool = False

    def find(self) -> bool:
        """Return whether the worker has a slot for the tenant."""
        if not self._found:
            self._slot = self._row.find_slot(self._key, self._slot)
            self._found = self._slot < MAX_SHARED and self._row.keys[self._slot] == self._key
        return self._found

    @property
    def requests(self) -> int:
        return self._row.requests[self._slot] if self.find() else 0

    @property
    def full_at_s(self) -> float:
        return self._row.full_at_s[self._slot] if self.find() else 0.0


class SharedUse(TenantUse):
    """Use of a tenant that the other workers see. Its cost grows with their number."""

    __slots__ = ("_others", "_row", "_slot")

    def __init__(self, row: LedgerRow, slot: int, others: Sequence[SlotReader]) -> None:
        super().__init__()
        self._row = row
        self._slot = slot
        self._others = others
        self.full_at_s = row.full_at_s[slot]

    def begin_request(self) -> None:
        self.requests += 1
        self._row.requests[self._slot] = self.requests

    def end_request(self) -> None:
        self.requests -= 1
        self._row.requests[self._slot] = self.requests

    def total_requests(self) -> int:
        return self.requests + sum([other.requests for other in self._others])

    def latest_full_at_s(self) -> float:
        return max([self.full_at_s, *(other.full_at_s for other in self._others)])

    def set_full_at_s(self, full_at_s: float) -> None:
        self.full_at_s = self._row.full_at_s[self._slot] = full_at_s


class RateLimiter:
    """Rate limit per tenant: a token bucket that fills at a constant rate.

    The bucket holds the tokens of one minute. So a tenant within its limit in each minute is never
    rejected, even if its requests come in bursts. After a pause, a tenant may send the requests of
    two minutes in one. The bucket is the time at which it will be full (the generic cell rate
    algorithm, ITU-T I.371): of several workers' times, the latest one counts.
    """

    def __init__(self, per_minute: float) -> None:
        self._token_s = MINUTE_S / per_minute
        self._spare_s = (max(1.0, per_minute) - 1) * self._token_s
        """Longest time until the bucket is full at which it has a token."""

    def take_token(self, use: TenantUse, now_s: float) -> float:
        """Return the seconds until the tenant's next request; 0 admits this one and counts it."""
        full_at_s = max(now_s, use.latest_full_at_s())
        wait_s = full_at_s - now_s - self._spare_s
        if wait_s > ROUNDING_S:
            return wait_s
        use.set_full_at_s(full_at_s + self._token_s)
        return 0.0
