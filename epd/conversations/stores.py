"""Where conversations are kept: in this process, or in Redis."""

from typing import Protocol

from epd.conversations.entry import Entry


class StoreAway(Exception):
    """A store cannot be read or written. The message holds no secret."""


class Store(Protocol):
    """Entries by key, each for a while, and each taken once."""

    async def take(self, key: str) -> Entry | None:
        """The entry of a key, which nobody else gets any more; None: there is none.

        Raises:
            StoreAway: nobody can tell.
        """

    async def put(self, key: str, entry: Entry, ttl_s: float) -> None:
        """Keep an entry, in place of another of this key.

        Raises:
            StoreAway: it may or may not have been kept.
        """

    def forget(self, decode: str) -> None:
        """Drop the entries of a decode instance, as far as that can be done at once."""

    async def close(self) -> None:
        """Keep nothing more."""

    @property
    def kept(self) -> int | None:
        """How many there are; None: nobody has counted."""

    @property
    def evicted(self) -> int:
        """How many no turn has found: for want of room, over, or of a decode that is gone.

        What is over counts once that is noticed; what only another store could count, never.
        """
