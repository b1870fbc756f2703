"""Prompts as chains, and the known content of an engine's prefix cache. No I/O.

An engine computes a prompt only from the first block on that its prefix cache lacks. A prompt is a
chain of links, each a digest of the whole prompt up to the end of the link. So two prompts have a
link in common exactly if they are equal up to its end.

An instance's cache is known approximately: it has what this proxy has sent there, until it is
evicted. With events of the engine it is known precisely (`epd.kv_events`): what it has
stored, until it is removed. Then only prompts that wait for their prefill are estimated.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_LINKS = 16_384
"""Upper bound of the links that are kept for one engine: some 3 MB of memory."""

MAX_TOKENS = 500_000
"""Upper bound of the tokens of these links, for an engine that does not report its size."""

LINK_TTL_S = 300.0
"""Time after its last use at which a link expires, in seconds: other clients of the engine evict
blocks too."""


class Prefix(NamedTuple):
    """A prompt as a chain.

    Attributes:
        links: digests, each of the prompt up to the end of the link.
        ends: estimated number of tokens up to the end of each link.
        session: affinity key of its session or conversation; empty for none.
    """

    links: Sequence[int] = ()
    ends: Sequence[int] = ()
    session: str = ""

    @property
    def tokens(self) -> int:
        return self.ends[-1] if self.ends else 0

    def tokens_of(self, links: int) -> int:
        return self.ends[links - 1] if links else 0


NO_PREFIX = Prefix()
"""Value of a request that is not placed by its content."""


@dataclass(slots=True, eq=False)
class PrefixCache:
    """Known content of one engine's prefix cache, and the prompts that wait for its prefill.

    Links are evicted as the engine evicts blocks: the least recently used first, and the end of a
    prompt before its beginning. So a link is never kept without the links before it. Only an event
    removes a link that the engine has reported.

    Attributes:
        limit: upper bound of the tokens of the estimated links.
        tokens: tokens of the estimated links.
        precise: whether events of the engine keep the content up to date.
        pending: tokens that the engine has to compute for prompts of this proxy.
        prompt_tokens: tokens of all prompts so far.
        matched: the part of `prompt_tokens` that was in the cache.
    """

    _clock: Callable[[], float]
    _links: OrderedDict[int, tuple[int, float]] = field(default_factory=OrderedDict)
    _reported: OrderedDict[int, int] = field(default_factory=OrderedDict)
    limit: int = MAX_TOKENS
    tokens: int = 0
    precise: bool = False
    pending: int = 0
    prompt_tokens: int = 0
    matched: int = 0

    def __len__(self) -> int:
        return len(self._links) + len(self._reported)

    def match(self, prefix: Prefix) -> int:
        """Return the number of links at the beginning of a prompt that are in the cache."""
        known, reported = self._links, self._reported
        if not known and not reported:
            return 0
        self._evict()
        if not reported:
            if prefix.links[0] not in known:
                return 0
            return bisect_left(prefix.links, True, key=lambda link: link not in known)
        return bisect_left(
            prefix.links, True, key=lambda link: link not in reported and link not in known
        )

    def hold(self, prefix: Prefix) -> None:
        """Add the links of a prompt, or mark them as used."""
        known, expires_s, end = self._links, self._clock() + LINK_TTL_S, prefix.tokens
        for index in range(len(prefix.links) - 1, -1, -1):
            link, before = prefix.links[index], prefix.ends[index - 1] if index else 0
            if link in self._reported:
                self._reported.move_to_end(link)
            else:
                self.drop(link)
                known[link] = end - before, expires_s
                self.tokens += end - before
            end = before
        self._evict()

    def drop(self, link: int) -> None:
        self._reported.pop(link, None)
        if (found := self._links.pop(link, None)) is not None:
            self.tokens -= found[0]

    def clear(self) -> None:
        """Remove all links: the engine has been restarted."""
        self._links.clear()
        self._reported.clear()
        self.tokens = 0
        self.precise = False

    def apply_changes(self, changes: Mapping[int, int | None]) -> None:
        """Record links that the engine reports, with their tokens; None for a link that it lost."""
        for link, tokens in changes.items():
            if tokens is None:
                self.drop(link)
                continue
            self.precise = True
            if link not in self._reported:
                self.drop(link)
                self._reported[link] = tokens

    def estimate_reported(self) -> None:
        """Estimate from now on what the engine has reported: events are missing."""
        expires_s = self._clock() + LINK_TTL_S
        for link, tokens in self._reported.items():
            self._links[link] = tokens, expires_s
            self.tokens += tokens
        self._reported.clear()
        self.precise = False
        self._evict()

    def begin_prompt(self, prefix: Prefix) -> int:
        """Count a prompt that the engine gets now. Return the tokens that it has to compute."""
        matched = prefix.tokens_of(self.match(prefix))
        computed = prefix.tokens - matched
        self.prompt_tokens += prefix.tokens
        self.matched += matched
        self.pending += computed
        self.hold(prefix)
        return computed

    def _evict(self) -> None:
        known, now_s = self._links, self._clock()
        while known:
            tokens, expires_s = next(iter(known.values()))
            if expires_s > now_s and self.tokens <= self.limit and len(known) <= MAX_LINKS:
                return
            known.popitem(last=False)
            self.tokens -= tokens
