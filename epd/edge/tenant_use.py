"""Requests and bytes of each tenant, counted over all workers, and the limit of its rate. Pure."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MINUTE_S = 60.0
ROUNDING_S = 1e-6
"""Tolerance for times on the clock, in seconds."""

MAX_SHARED = 16384
"""Upper bound of the tenants with shared counts. Each worker counts further ones alone."""


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
        return SharedUse(row, slot, [other for other in self._rows if other is not row])

    def forget_requests(self, worker: int) -> None:
        """Remove the requests of a worker that has died. Its rates stay."""
        row = self._rows[worker]
        for slot in range(row.find_slot(0)):
            row.requests[slot] = 0


class SharedUse(TenantUse):
    """Use of a tenant that the other workers see. Its cost grows with their number."""

    __slots__ = ("_found", "_key", "_others", "_row", "_slot")

    def __init__(self, row: LedgerRow, slot: int, others: Sequence[LedgerRow]) -> None:
        super().__init__()
        self._row = row
        self._slot = slot
        self._key = row.keys[slot]
        self._others = others
        self._found = [0] * len(others)  # slots from which the tenant's is searched
        self.full_at_s = row.full_at_s[slot]

    def begin_request(self) -> None:
        self.requests += 1
        self._row.requests[self._slot] = self.requests

    def end_request(self) -> None:
        self.requests -= 1
        self._row.requests[self._slot] = self.requests

    def total_requests(self) -> int:
        return self.requests + sum([row.requests[slot] for row, slot in self._other_slots()])

    def latest_full_at_s(self) -> float:
        return max([self.full_at_s, *(row.full_at_s[slot] for row, slot in self._other_slots())])

    def set_full_at_s(self, full_at_s: float) -> None:
        self.full_at_s = self._row.full_at_s[self._slot] = full_at_s

    def _other_slots(self) -> Iterator[tuple[LedgerRow, int]]:
        """Yield the slots of the tenant in the rows of the other workers that have one."""
        for number, row in enumerate(self._others):
            slot = self._found[number] = row.find_slot(self._key, self._found[number])
            if slot < MAX_SHARED and row.keys[slot] == self._key:
                yield row, slot
