"""Claims in Redis: `SET NX PX`, whose value is the owner.

No script compares and renews, or compares and removes, in one go: a user would need the right to
run any. Where a claim ends between the two and another takes it, theirs is renewed, or removed. At
worst an entry is encoded twice, and a claim whose holder is gone ends later, by its time once more.
"""

from collections.abc import Sequence

from ec_store.redis_client import RedisClient
from ec_store.redis_link import Command, Reply
from ec_store.redis_names import Names


class RedisClaims:
    """The claims of a store. Every method raises StoreUnavailable."""

    def __init__(self, client: RedisClient, names: Names) -> None:
        self._client = client
        self._names = names

    def take(self, digests: Sequence[str], owner: bytes, ms: int) -> list[bool]:
        """Claim entries, or go on claiming them; False where another does.

        One round trip, and a second where some were claimed by this owner already.
        """
        return self.take_and_ask(digests, owner, ms, ())[0]

    def take_and_ask(
        self, digests: Sequence[str], owner: bytes, ms: int, then: Sequence[Command]
    ) -> tuple[list[bool], list[Reply]]:
        """As `take`, and the replies to what is asked after it in the same round trip."""
        names = [self._names.claim(digest) for digest in digests]
        claims: list[Command] = [
            command
            for name in names
            for command in (("SET", name, owner, "NX", "PX", ms), ("GET", name))
        ]
        replies = self._client.run([*claims, *then])
        replies, answers = replies[: len(claims)], replies[len(claims) :]
        # Not PEXPIRE in the same go: it would renew another's claim each time somebody asks.
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
        """Claim entries no more. What another claims is left alone. Two round trips."""
        names = [self._names.claim(digest) for digest in digests]
        holders = self._client.run([("GET", name) for name in names])
        self._client.run(
            [
                ("UNLINK", name)
                for name, holder in zip(names, holders, strict=True)
                if holder == owner
            ]
        )
