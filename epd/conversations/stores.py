"""Interface of the stores of conversations: in this process, or in Redis."""

from typing import Protocol

from epd.conversations.entry import Entry


class StoreAway(Exception):
    """A read or a write failed. The message contains no secret."""


class Store(Protocol):
    """Entries by key, with a time to live, each of which can be taken once."""

    async def take(self, key: str) -> Entry | None:
        """Remove and return the entry of a key; None if there is none.

        Raises:
            StoreAway: the store did not answer.
        """

    async def put(self, key: str, entry: Entry, ttl_s: float) -> None:
        """Store an entry, and replace an earlier one of this key.

        Raises:
            StoreAway: the store did not answer; the entry may be stored or not.
        """

    def forget(self, decode: str) -> None:
        """Drop the entries of a decode instance, if the store can do so without waiting."""

    async def close(self) -> None:
        """Close the connections of the store."""

    @property
    def kept(self) -> int | None:
        """The number of entries; None if the store does not count them."""

    @property
    def evicted(self) -> int:
        """The number of entries dropped without use: evicted, expired, or with lost blocks.

        An expired entry counts when it is detected. Expiry by an external store does not count.
        """
