"""Turn of a conversation. Pure."""

from dataclasses import dataclass
from typing import NamedTuple

from epd.conversations.capture import ReplyCapture
from epd.conversations.entry import Basis, ConversationEntry


@dataclass(slots=True, eq=False)
class Turn:
    """The turn of a request in a conversation.

    Attributes:
        key: key of the conversation.
        begun: whether the previous turn has been looked up.
        before: entry of the previous turn; None without one.
    """

    key: str
    begun: bool = False
    before: ConversationEntry | None = None


class AnsweredTurn(NamedTuple):
    """A turn with its answer in progress.

    Attributes:
        key: key of the conversation.
        decode: URL of the decode instance.
        prefill: URL of the prefill instance; None without prefill.
        basis: dependencies of its blocks; None if they cannot be reused.
        capture: fields extracted from decode's answer; None if they are not extracted.
    """

    key: str
    decode: str
    prefill: str | None
    basis: Basis | None
    capture: ReplyCapture | None

    def capture_fields(self, events: bytes) -> bytes:
        return events if self.capture is None else self.capture.capture_fields(events)
