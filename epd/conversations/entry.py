"""The entry of a conversation between two turns."""

from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from epd.conversations.fingerprint import Fingerprint
from epd.transfer.readback import kept_params

MAX_BYTES = 1024**2
"""Maximum size of an entry: blocks and fingerprint of some 200,000 tokens."""


@dataclass(frozen=True, slots=True)
class Held:
    """KV blocks that a decode instance holds for a limited time.

    Attributes:
        params: `kv_transfer_params` of decode, by which prefill reads them.
        tokens: fingerprint of the tokens in the blocks.
        media: keys of the media items among them, in order.
        form: digest of all other fields that the blocks depend on.
        engine: id of the engine that holds them; it changes with a restart.
    """

    params: dict[str, Any]
    tokens: Fingerprint
    media: tuple[str, ...]
    form: str
    engine: str


@dataclass(frozen=True, slots=True)
class Entry:
    """The state of a conversation after a turn.

    Attributes:
        kept_s: time of storing, by `time.time`, because other proxies read it.
        decode: URL of the decode instance.
        prefill: URL of the prefill instance; None without prefill.
        held: blocks that decode holds, if known.
    """

    kept_s: float
    decode: str
    prefill: str | None = None
    held: Held | None = None

    def written(self) -> bytes:
        """Return the entry as JSON."""
        return _ENTRY.dump_json(self)


_ENTRY = TypeAdapter(Entry)


def read(written: bytes) -> Entry | None:
    """Parse an entry; return None for an invalid one, which another version may have written."""
    try:
        entry = _ENTRY.validate_json(written)
        held = entry.held
        usable = held is None or kept_params(held.params, entry.decode) is not None
    except ValueError:  # a ValidationError too
        return None
    return entry if usable else None
