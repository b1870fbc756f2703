"""Upper bound of the large entries that are written at once, over all processes of a fleet.

A server holds a value twice while it receives it: the value, and a buffer of its size for the next
one. Both count towards `maxmemory`. Sixteen writers of entries of 30 MB would take 1 GB of it for
themselves, and with it the entries that are there.

A permit is a key with a time to live: a writer that is killed blocks it no longer than its call
could have taken. In rare races more writers than permits write at once; permits bound memory, and
correctness does not depend on them.
"""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from ec_store.errors import StoreUnavailable
from ec_store.redis.client import OutOfMemory, RedisClient
from ec_store.redis.url import PERMITS

LARGE_BYTES = 4 * 2**20
"""Size in bytes from which an entry needs a permit."""


PAUSE_S = 0.02
"""Longest pause in seconds between two attempts to take a permit."""


class _Permit(NamedTuple):
    """Permit that this thread holds until `until_s` of the monotonic clock."""

    name: bytes
    until_s: float


class WritePermits:
    """Permits of one store. Thread-safe."""

    def __init__(self, client: RedisClient, prefix: str, timeout_s: float) -> None:
        self._client = client
        self._names = [f"{prefix}:writing:{number}".encode() for number in range(PERMITS)]
        self._timeout_s = timeout_s
        self._timeout_ms = max(1, int(timeout_s * 1000))

    @contextmanager
    def hold_permit(self, size_bytes: int) -> Iterator[None]:
        """Open a context in which an entry of this size may be written.

        A large entry waits for a permit, at most half of a call's timeout, with one round trip for
        each attempt and another one for the release. If the server of a permit cannot be reached,
        the entry needs none: the permits of a cluster are on several nodes.

        Raises:
            StoreUnavailable: all permits are taken, or the server is out of memory.
        """
        if size_bytes < LARGE_BYTES:
            yield
            return
        ends_s = time.monotonic() + self._timeout_s / 2
        while (permit := self._take_permit()) is None:
            if time.monotonic() > ends_s:
                raise StoreUnavailable(
                    f"{PERMITS} other writers are sending large entries to Redis, so the entry is "
                    "dropped"
                )
            time.sleep(random.uniform(0, PAUSE_S))  # noqa: S311
        try:
            with self._client.close_after_calls():
                yield
        finally:
            # An expired permit may be another writer's by now.
            if time.monotonic() < permit.until_s:
                with suppress(StoreUnavailable):
                    self._client.run([("UNLINK", permit.name)])

    def _take_permit(self) -> _Permit | None:
        for name in random.sample(self._names, PERMITS):
            permit = _Permit(name, time.monotonic() + self._timeout_s)
            try:
                [taken] = self._client.run([("SET", name, b"", "NX", "PX", self._timeout_ms)])
            except OutOfMemory:
                raise
            except StoreUnavailable:
                return _Permit(name, 0.0)
            if taken is not None:
                return permit
        return None
