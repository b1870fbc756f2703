"""One turn of a conversation: what the previous turn left, and what this one leaves."""

from typing import NamedTuple

from epd.bodies.items import Body
from epd.conversations.entry import Entry, Held
from epd.conversations.heard import Heard


class Basis(NamedTuple):
    """Everything beside the tokens that the blocks of a turn depend on.

    Attributes:
        form: digest of fields of the request.
        media: keys of the media items, in order.
    """

    form: str
    media: tuple[str, ...]

    def continues(self, held: Held) -> bool:
        """Return whether blocks of an earlier turn may be usable."""
        return self.form == held.form and self.media[: len(held.media)] == held.media


class Turn:
    """The turn of a request in a conversation.

    Attributes:
        key: key of the conversation.
        begun: whether the previous turn has been looked up.
        before: entry of the previous turn; None without one.
        prefill: URL of the prefill instance of this turn.
        decode: URL of the decode instance of this turn.
        basis: dependencies of its blocks; None if they cannot be reused.
        heard: fields extracted from decode's answer; None if they are not extracted.
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
        """URL of the previous turn's prefill instance, which may have the blocks itself."""
        return None if self.before is None else self.before.prefill

    @property
    def prefers_decode(self) -> str | None:
        """URL of the previous turn's decode instance."""
        return None if self.before is None else self.before.decode

    def follow(self, before: Entry) -> None:
        """Continue with the entry of the previous turn."""
        self.before, self._held = before, before.held

    def take(self) -> Held | None:
        """Return the blocks of the previous turn; only the first call returns them."""
        held, self._held = self._held, None
        return held

    def asking(self, body: Body) -> Body:
        """Return the decode request, which asks for the tokens if they are needed."""
        wanted = bool(body.get("return_token_ids"))
        self.heard = Heard(cut_tokens=not wanted)
        return body if self.basis is None or wanted else {**body, "return_token_ids": True}

    def hear(self, said: bytes) -> bytes:
        """Pass events to `Heard.hear`, if their fields are extracted."""
        return said if self.heard is None else self.heard.hear(said)
