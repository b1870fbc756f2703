"""Marks of prompts, which engines repeat in their KV events. No I/O.

A block has a hash over all tokens up to its end, and a proxy without a tokenizer cannot compute it.
So each request to an engine carries a marker, which names the links of its prompt with their
estimated ends. The engine repeats the marker with the blocks that it stores for the request (vLLM:
`session_id` of `BlockStored`).

The marker has all that is needed. So each proxy and each worker also knows the prompts of the
others.
"""

import base64
import binascii
import struct
from bisect import bisect_left
from functools import lru_cache

from epd.routing.prefix import NO_PREFIX, Prefix

MARKER = "epd1."
"""Beginning of each marker: its format, with the version."""

MAX_END = 2**32 - 1

_LINK_BYTES = struct.calcsize("!QI")
_ALL, _OF_EACH_OCTAVE, _OCTAVES = 64, 16, 8
_INDEXES = (
    *range(_ALL),
    *(
        index
        for octave in range(_OCTAVES)
        for index in range(_ALL << octave, _ALL << octave + 1, (_ALL << octave) // _OF_EACH_OCTAVE)
    ),
)
"""Places of the links in a marker: the first 64, then 16 for each doubling.

They do not depend on the prompt, so that prompts that begin alike have equal links in their
markers.
"""


def sampled_prefix(prefix: Prefix) -> Prefix:
    """Return a prompt with those of its links that a marker has, and its last one."""
    count = len(prefix.links)
    if count <= _ALL:
        return prefix
    places = [*_INDEXES[: bisect_left(_INDEXES, count)]]
    if places[-1] != count - 1:
        places.append(count - 1)
    links, ends = prefix.links, prefix.ends
    return prefix._replace(links=[links[at] for at in places], ends=[ends[at] for at in places])


def marker_of(prefix: Prefix) -> str:
    """Return the marker of a sampled prompt, as the value of a header."""
    count = len(prefix.links)
    ends = [min(end, MAX_END) for end in prefix.ends]
    packed = struct.pack(f"!{count}Q{count}I", *prefix.links, *ends)
    return MARKER + base64.urlsafe_b64encode(packed).decode()


@lru_cache(maxsize=512)
def read_marker(marker: str | None) -> Prefix:
    """Return the prompt of a marker; `NO_PREFIX` for any other text."""
    if marker is None or not marker.startswith(MARKER):
        return NO_PREFIX
    try:
        packed = base64.b64decode(marker[len(MARKER) :], altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return NO_PREFIX
    count, rest = divmod(len(packed), _LINK_BYTES)
    if rest or count > len(_INDEXES) + 1:
        return NO_PREFIX
    values = struct.unpack(f"!{count}Q{count}I", packed)
    links, ends = values[:count], values[count:]
    return Prefix(links, ends) if list(ends) == sorted(ends) else NO_PREFIX
