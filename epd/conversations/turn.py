"""One turn of a conversation: what the one before has left, and what this one leaves."""

from typing import NamedTuple

from epd.bodies.items import Body
from epd.conversations.entry import Entry, Held
from epd.conversations.heard import Heard


class Basis(NamedTuple):
    """What the blocks of a turn depend on beside their tokens.

    Attributes:
        form: the digest of fields of its request.
        media: the keys of its media items, in order.
    """

    form: str
    media: tuple[str, ...]

    def continues(self, held: Held) -> bool:
        """Whether blocks of an earlier turn may be of use."""
        return self.form == held.form and self.media[: len(held.media)] == held.media


class Turn:
    """Of one request, which belongs to a conversation.

    Attributes:
        key: the conversation's.
        begun: whether the last turn has been looked for.
        before: what the last turn has left, unless nobody knows.
        prefill: URL of the instance that prefilled this one.
        decode: URL of the one that answers it.
        basis: what its blocks depend on; None where nothing can be kept of them.
        heard: what decode has told; None where it is not listened to.
    """

    __slots__ = ("_held", "basis", "before", "begun", "decode", "heard", "key", "prefill")

    def __init__(self, key: str) -> None:
        self.key = key
        self.begun = False
        self.before: Entry | None = None
        self._held: Held | None = None
        self.prefill: str | None = None
        self.decode: str | None = None
        self.basis: Basis | None = None
        self.heard: Heard | None = None

    @property
    def prefers_prefill(self) -> str | None:
        """URL of the instance that prefilled the last turn: it may have the blocks itself."""
        return None if self.before is None else self.before.prefill

    @property
    def prefers_decode(self) -> str | None:
        """URL of the one that answered it."""
        return None if self.before is None else self.before.decode

    def follow(self, before: Entry) -> None:
        """Go on with what the last turn has left."""
        self.before, self._held = before, before.held

    def take(self) -> Held | None:
        """What the last turn's decode instance holds: once, whatever becomes of it."""
        held, self._held = self._held, None
        return held

    def asking(self, body: Body) -> Body:
        """The decode request, which asks for the tokens too where they are of use."""
        wanted = bool(body.get("return_token_ids"))
        self.heard = Heard(cut_tokens=not wanted)
        return body if self.basis is None or wanted else {**body, "return_token_ids": True}

    def hear(self, said: bytes) -> bytes:
        """See `Heard.hear`."""
        return said if self.heard is None else self.heard.hear(said)
