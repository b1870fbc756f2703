"""KV events of an engine: their addresses, its blocks, and the links of prompts in these. No I/O.

An engine reports the blocks that it stores and removes. A block has a hash over all tokens up to
its end, and a proxy without a tokenizer cannot compute it. So each request to an engine carries a
mark, which names the links of its prompt with their estimated ends. The engine repeats the mark
with the blocks that it stores for the request (vLLM: `session_id` of `BlockStored`). A link is then
tied to the block in which it ends, and lives as long as that block.

The mark has all that is needed. So each proxy and each worker also knows the prompts of the others.
"""

import base64
import binascii
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

from ec_store.bounded import BoundedDict
from epd.routing.instances import CONSUMERS, Instance, Role
from epd.routing.prefix import MAX_LINKS, NO_PREFIX, Prefix
from epd.routing.urls import EVENTS_AT, named_events_address

DEFAULT_EVENTS_AT = "tcp://*:5557"
"""vLLM's default endpoint. `*` stands for the host of the instance."""

MAX_PORT = 65535

EventCounts = Callable[[], Mapping[tuple[Role, str], Mapping[str, int]]]
"""Returns the number of KV events and of faults, by the key of an instance and kind."""


class EventSource(NamedTuple):
    """Endpoints of one engine: publisher of the events, and server of past ones; empty for none."""

    endpoint: str
    replay: str = ""


def event_sources(instance: Instance, addresses: Sequence[str]) -> Iterator[EventSource]:
    """Yield the endpoints of each of an instance's engines.

    The addresses are of instances, as of `named_events_address`. vLLM adds the number of a
    data-parallel rank to the ports.
    """
    if instance.dp_size > 1 and instance.role not in CONSUMERS:
        return  # it chooses the rank itself: which engine has a prompt is not known
    named = dict(map(named_events_address, addresses))
    address = instance.kv_events or named.get(instance.url) or named.get("", DEFAULT_EVENTS_AT)
    found = EVENTS_AT.fullmatch(address)
    if found is None:
        yield EventSource(address)
        return
    host, port, replay = found.groups()
    if host == "*":
        host = urlsplit(instance.url).hostname or ""
        host = f"[{host}]" if ":" in host else host
    last = MAX_PORT - max(int(port), int(replay or 0))
    for rank in range(min(instance.dp_size, last + 1)):
        yield EventSource(
            f"tcp://{host}:{int(port) + rank}",
            f"tcp://{host}:{int(replay) + rank}" if replay else "",
        )


MARK = "epd1."
"""Beginning of each mark: its format, with the version."""

MAX_BLOCKS = 262_144
"""Upper bound of the known blocks of one engine: some 26 MB, and 4 million tokens with vLLM's
default size."""

MAX_PROMPTS = 16_384
"""Upper bound of the prompts of one engine with a known length."""

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
"""Places of the links in a mark: the first 64, then 16 for each doubling.

They do not depend on the prompt, so that prompts that begin alike have equal links in their marks.
"""


def sampled_prefix(prefix: Prefix) -> Prefix:
    """Return a prompt with those of its links that a mark has, and its last one."""
    count = len(prefix.links)
    if count <= _ALL:
        return prefix
    places = [*_INDEXES[: bisect_left(_INDEXES, count)]]
    if places[-1] != count - 1:
        places.append(count - 1)
    links, ends = prefix.links, prefix.ends
    return prefix._replace(links=[links[at] for at in places], ends=[ends[at] for at in places])


def mark_of(prefix: Prefix) -> str:
    """Return the mark of a sampled prompt, as the value of a header."""
    count = len(prefix.links)
    ends = [min(end, MAX_END) for end in prefix.ends]
    packed = struct.pack(f"!{count}Q{count}I", *prefix.links, *ends)
    return MARK + base64.urlsafe_b64encode(packed).decode()


@lru_cache(maxsize=512)
def read_mark(mark: str | None) -> Prefix:
    """Return the prompt of a mark; `NO_PREFIX` for any other text."""
    if mark is None or not mark.startswith(MARK):
        return NO_PREFIX
    try:
        packed = base64.b64decode(mark[len(MARK) :], altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return NO_PREFIX
    count, rest = divmod(len(packed), _LINK_BYTES)
    if rest or count > len(_INDEXES) + 1:
        return NO_PREFIX
    values = struct.unpack(f"!{count}Q{count}I", packed)
    links, ends = values[:count], values[count:]
    return Prefix(links, ends) if list(ends) == sorted(ends) else NO_PREFIX


@dataclass(slots=True, eq=False)
class BlockMap:
    """Known blocks of one engine, and the links that are tied to them.

    A copy of a block counts by itself: an engine that computes two equal prompts at once stores
    their blocks twice, and later removes each.
    """

    _ends: dict[int, int] = field(default_factory=dict)
    _copies: dict[int, int] = field(default_factory=dict)
    _links: dict[int, set[int]] = field(default_factory=dict)
    _block_of: dict[int, int] = field(default_factory=dict)
    _prompts: BoundedDict[int, int] = field(default_factory=lambda: BoundedDict(MAX_PROMPTS))
    _changes: dict[int, int | None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def change_count(self) -> int:
        return len(self._changes)

    def take_changes(self) -> Mapping[int, int | None]:
        """Return the tokens of each link that has been tied since the last call; None: lost."""
        changes, self._changes = self._changes, {}
        return changes

    def record_stored(
        self, blocks: Sequence[int], parent: int | None, size: int, mark: str | None
    ) -> None:
        """Record hashes of blocks of `size` tokens that follow each other.

        `parent` is the hash of the block before them; None at the beginning of a prompt. `mark` is
        that of the request that they were stored for.
        """
        prompt = read_mark(mark)
        start = 0 if parent is None else self._ends.get(parent)
        if start is None:
            if not prompt.links or parent is None:
                return
            # Stored before this process listened. The prompt is assumed to end with the blocks.
            start = max(0, prompt.tokens - size * len(blocks)) // size * size
            self._ends[parent] = start
        end = start
        for block in blocks:
            end += size
            if block in self._ends:
                self._copies[block] = self._copies.get(block, 1) + 1
            else:
                self._ends[block] = end
        if prompt.tokens:
            self._tie_links(prompt, blocks, parent, start, size)
        while len(self._ends) > MAX_BLOCKS:
            self._drop_block(next(iter(self._ends)))

    def record_removed(self, blocks: Iterable[int]) -> None:
        """Record that the engine has removed one copy of each of these blocks."""
        for block in blocks:
            copies = self._copies.pop(block, 1)
            if copies > 1:
                self._copies[block] = copies - 1
            elif block in self._ends:
                self._drop_block(block)

    def clear_blocks(self) -> None:
        for known in (self._ends, self._copies, self._links, self._block_of, self._changes):
            known.clear()
        self._prompts.clear()

    def _tie_links(
        self, prompt: Prefix, blocks: Sequence[int], parent: int | None, start: int, size: int
    ) -> None:
        """Tie the links of a prompt that end in these blocks, or before them.

        The engine has the blocks before, because it has stored their successors. The true length of
        the prompt corrects the estimated ends of its links. It is the end of the first blocks, and
        of later ones that come several at a time: those of the answer come one by one.
        """
        last, key = start + size * len(blocks), prompt.links[-1]
        known = self._prompts.get(key, 0)
        if start >= known > 0 and len(blocks) == 1:
            return
        self._prompts[key] = known = max(known, last)
        scale = 1.0 if known <= prompt.tokens < known + size else (known + size / 2) / prompt.tokens
        before = 0
        for link, end in zip(prompt.links, prompt.ends, strict=True):
            true_end = int(end * scale)
            place = (true_end - start) // size - 1
            if place >= len(blocks):
                return
            if place >= 0:
                self._tie_link(link, blocks[place])
            elif parent is not None and true_end >= size and link not in self._block_of:
                self._tie_link(link, parent)
            if link in self._block_of:
                self._changes[link] = end - before
            before = end

    def _tie_link(self, link: int, block: int) -> None:
        self._untie_link(link)
        self._block_of[link] = block
        self._links.setdefault(block, set()).add(link)
        if len(self._block_of) > MAX_LINKS:
            oldest = next(iter(self._block_of))
            self._untie_link(oldest)
            self._changes[oldest] = None

    def _untie_link(self, link: int) -> None:
        if (block := self._block_of.pop(link, None)) is not None:
            links = self._links[block]
            links.discard(link)
            if not links:
                del self._links[block]

    def _drop_block(self, block: int) -> None:
        del self._ends[block]
        self._copies.pop(block, None)
        for link in self._links.pop(block, ()):
            del self._block_of[link]
            self._changes[link] = None
