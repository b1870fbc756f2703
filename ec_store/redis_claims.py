"""Claims in Redis: `SET NX PX`, with the owner as value.

No script compares and renews, or compares and removes, atomically: the Redis user would need the
right to run any script. If a claim expires between the two commands and another owner takes it, the
second command renews or removes that owner's claim. At worst an entry is encoded twice, and a claim
of a dead holder lives for twice its time.
"""

from collections.abc import Sequence

from ec_store.redis_client import RedisClient
from ec_store.redis_link import Command, Reply
from ec_store.redis_names import Names


class RedisClaims:
    """Claims of one store. Every method may raise StoreUnavailable."""

    def __init__(self, client: RedisClient, names: Names) -> None:
        self._client = client
        self._names = names

    def take(self, digests: Sequence[str], owner: bytes, ms: int) -> list[bool]:
        """Take or renew claims; False for each entry that another owner claims.

        One round trip, and a second one if this owner held some of them already.
        """
        return self.take_and_ask(digests, owner, ms, ())[0]

    def take_and_ask(
        self, digests: Sequence[str], owner: bytes, ms: int, then: Sequence[Command]
    ) -> tuple[list[bool], list[Reply]]:
        """Take claims as `take`, and return the replies to commands sent in the same round trip."""
        names = [self._names.claim(digest) for digest in digests]
        claims: list[Command] = [
            command
            for name in names
            for command in (("SET", name, owner, "NX", "PX", ms), ("GET", name))
        ]
        replies = self._client.run([*claims, *then])
        replies, answers = replies[: len(claims)], replies[len(claims) :]
        # A PEXPIRE in the same round trip would renew another owner's claim with each call.
        held = [
            name
            for name, taken, holder in zip(names, replies[::2], replies[1::2], strict=True)
            if not taken and holder == owner
        ]
        renewed = self._renewed(held, owner, ms)
        taken = [
            bool(taken) or renewed.get(name, False)
            for name, taken in zip(names, replies[::2], strict=True)
        ]
        return taken, answers

    def _renewed(self, names: Sequence[bytes], owner: bytes, ms: int) -> dict[bytes, bool]:
        replies = self._client.run(
            [command for name in names for command in (("PEXPIRE", name, ms), ("GET", name))]
        )
        return {name: holder == owner for name, holder in zip(names, replies[1::2], strict=True)}

    def give_back(self, digests: Sequence[str], owner: bytes) -> None:
        """Release claims. Claims of other owners stay. Two round trips."""
        names = [self._names.claim(digest) for digest in digests]
        holders = self._client.run([("GET", name) for name in names])
        self._client.run(
            [
                ("UNLINK", name)
                for name, holder in zip(names, holders, strict=True)
                if holder == owner
            ]
        )
