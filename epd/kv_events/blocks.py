"""Blocks of the KV cache of one engine, and the links of prompts in them. No I/O.

An engine reports the blocks that it stores and removes. The marker of a request (`markers`) names
the links of its prompt. A link is tied to the block in which it ends, and lives as long as that
block.
"""

from collections.abc import Iterable, Mapping, Sequence

from ec_store.bounded import BoundedDict
from epd.kv_events.markers import read_marker
from epd.routing.prefix import MAX_LINKS, Prefix

MAX_BLOCKS = 262_144
"""Upper bound of the known blocks of one engine: some 26 MB, and 4 million tokens with vLLM's
default size."""

MAX_PROMPTS = 16_384
"""Upper bound of the prompts of one engine with a known length."""


class BlockMap:
    """Known blocks of one engine, and the links that are tied to them.

    A copy of a block counts by itself: an engine that computes two equal prompts at once stores
    their blocks twice, and later removes each.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS, max_links: int = MAX_LINKS) -> None:
        self._max_blocks = max_blocks
        self._max_links = max_links
        self._ends: dict[int, int] = {}
        self._copies: dict[int, int] = {}
        self._links: dict[int, set[int]] = {}
        self._block_of: dict[int, int] = {}
        self._prompts: BoundedDict[int, int] = BoundedDict(MAX_PROMPTS)
        self._changes: dict[int, int | None] = {}

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
        self, blocks: Sequence[int], parent: int | None, size: int, marker: str | None
    ) -> None:
        """Record hashes of blocks of `size` tokens that follow each other.

        `parent` is the hash of the block before them; None at the beginning of a prompt. `marker`
        is that of the request that they were stored for.
        """
        prompt = read_marker(marker)
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
        while len(self._ends) > self._max_blocks:
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
        if len(self._block_of) > self._max_links:
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
