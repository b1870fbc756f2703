"""What is kept of a conversation from one turn to the next."""

from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from epd.conversations.fingerprint import Fingerprint
from epd.transfer.readback import kept_params

MAX_BYTES = 1024**2
"""Largest entry that is kept: blocks and fingerprint of some 200,000 tokens."""


@dataclass(frozen=True, slots=True)
class Held:
    """KV blocks that a decode instance holds for a while.

    Attributes:
        params: its `kv_transfer_params`, by which prefill reads them.
        tokens: those that they are of.
        media: the keys of the media items among them, in order.
        form: the digest of what else the blocks depend on.
        engine: the engine that has them; another is there after a restart.
    """

    params: dict[str, Any]
    tokens: Fingerprint
    media: tuple[str, ...]
    form: str
    engine: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A conversation after a turn.

    Attributes:
        kept_s: when, as `time.time` has it: other proxies read it.
        decode: URL of the instance that answered.
        prefill: URL of the one that prefilled, where one did.
        held: what decode holds, where it is known.
    """

    kept_s: float
    decode: str
    prefill: str | None = None
    held: Held | None = None

    def written(self) -> bytes:
        """As JSON."""
        return _ENTRY.dump_json(self)


_ENTRY = TypeAdapter(Entry)


def read(written: bytes) -> Entry | None:
    """The entry in JSON; None where it is none, as another version may have written it."""
    try:
        entry = _ENTRY.validate_json(written)
        held = entry.held
        usable = held is None or kept_params(held.params, entry.decode) is not None
    except ValueError:  # a ValidationError too
        return None
    return entry if usable else None
