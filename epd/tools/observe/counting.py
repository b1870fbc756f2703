"""Counts of the media in requests, made in a thread beside the relay.

Nothing of a prompt or of media is kept: an item is a 64-bit hash under a key that is drawn for this
run, and so is a conversation.
"""

import math
import queue
import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from blake3 import blake3

from epd.api.endpoints import ENDPOINTS
from epd.api.items import Body, MMItem
from epd.errors import ProxyError
from epd.media.image_header import image_size
from epd.media.parts import Inline, Remote, source
from epd.tools.observe.entry_sizes import EntrySizes, reported_tokens
from epd.tools.observe.reuse import Reference, ReuseDistances

MAX_TEXT_BYTES = 16 * 1024**2
"""Size of a body without its media above which it is not counted: the parser of its text holds the
GIL."""

PENDING_BYTES = 256 * 1024**2
"""Bytes of bodies that may wait to be counted. Further ones are not counted."""

GUESSED_BYTES = 1024.0**2
"""Size of an entry while none is known."""

NAMES = ("conversation_id", "session_id", "prompt_cache_key")
"""Fields by which clients name a conversation."""


class Observed(NamedTuple):
    """A request that was forwarded, and answered.

    Attributes:
        path: its path, without the query.
        content_type: its `Content-Type`.
        body: its body.
        server: index of the server that got it.
        answer: the end of the answer; empty without one.
    """

    path: str
    content_type: str
    body: bytes
    server: int
    answer: bytes = b""


@dataclass(slots=True)
class Kind:
    """Items of one modality.

    Attributes:
        repeats: estimated number of items that came before.
        sent_bytes: bytes of the media in the requests, in base64.
    """

    items: int = 0
    repeats: float = 0.0
    sent_bytes: int = 0
    pixels: int = 0


@dataclass(slots=True)
class Savings:
    """Bytes in requests, and pixels, of the sampled references that a cache would answer."""

    sent_bytes: float = 0.0
    pixels: float = 0.0


@dataclass(slots=True)
class Traffic:
    """Counts of the requests of this run.

    Attributes:
        distances: of the items, in bytes with `sizes`, else in entries.
        sizes: rule for the sizes of entries; None to count entries.
        requests: requests with a body of an endpoint that may have media.
        with_media: those with media.
        unreadable: those that this project's parser rejects; they are not counted.
        unsized: items of an unknown size, which count as the mean of the others.
        savings: what a cache would save, by its size.
        same_conversation: estimated repeats within a conversation.
        other_server: estimated repeats that went to another server than the time before.
        sampled_repeats: estimated repeats, of which the last two are parts.
    """

    distances: ReuseDistances
    sizes: EntrySizes | None = None
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    requests: int = 0
    with_media: int = 0
    unreadable: int = 0
    unsized: int = 0
    kinds: dict[str, Kind] = field(default_factory=dict)
    savings: dict[float, Savings] = field(default_factory=dict)
    same_conversation: float = 0.0
    other_server: float = 0.0
    sampled_repeats: float = 0.0
    _sized_items: int = 0
    _sized_bytes: float = 0.0

    def count(self, observed: Observed) -> None:
        """Count the media of a request."""
        if (endpoint := ENDPOINTS.get(observed.path)) is None:
            return
        self.requests += 1
        try:
            body, cuts, _ = endpoint.read(observed.body, observed.content_type, MAX_TEXT_BYTES)
            items = [(item, source(item, cuts)) for item in endpoint.items(body)]
        except ProxyError:
            self.unreadable += 1
            return
        if not items:
            return
        self.with_media += 1
        by_item = {item: self._hash(_identity(found)) for item, found in items}
        origin = self._conversation(body, by_item), observed.server
        pixels = {item: _pixels(item, found) for item, found in items}
        tokens = _tokens(pixels, reported_tokens(observed.answer))
        for item, found in items:
            size = self._entry_size(pixels[item], tokens.get(item, 0.0))
            reference = self.distances.refer(by_item[item], size, origin)
            self._count_item(item.modality, found, pixels[item], reference, origin)

    def _count_item(
        self,
        modality: str,
        found: Any,
        pixels: int,
        reference: Reference | None,
        origin: tuple[int | None, int],
    ) -> None:
        kind = self.kinds.setdefault(modality, Kind())
        sent_bytes = len(found.base64) if isinstance(found, Inline) else 0
        kind.items += 1
        kind.sent_bytes += sent_bytes
        kind.pixels += pixels
        if reference is None or reference.earlier is None:
            return
        weight, (conversation, server) = reference.weight, reference.earlier
        kind.repeats += weight
        self.sampled_repeats += weight
        self.same_conversation += weight * (conversation is not None and conversation == origin[0])
        self.other_server += weight * (server != origin[1])
        for size in self.distances.sizes:
            if reference.distance <= size:
                saved = self.savings.setdefault(size, Savings())
                saved.sent_bytes += weight * sent_bytes
                saved.pixels += weight * pixels

    @property
    def mean_bytes(self) -> float:
        """Mean size of the entries of which it is known; `GUESSED_BYTES` without one."""
        return self._sized_bytes / self._sized_items if self._sized_items else GUESSED_BYTES

    def _entry_size(self, pixels: int, tokens: float) -> float:
        if self.sizes is None:
            return 1.0
        size = tokens * self.sizes.token_bytes or self.sizes.image_bytes(pixels)
        if not size:
            self.unsized += 1
            return self.mean_bytes
        self._sized_items += 1
        self._sized_bytes += size
        return size

    def _hash(self, *parts: bytes | memoryview) -> int:
        hasher = blake3(key=self.key)
        for part in parts:
            hasher.update(part)
        return int.from_bytes(hasher.digest(8), "big")

    def _conversation(self, body: Body, hashes: Mapping[MMItem, int]) -> int | None:
        """Return a hash of what the turns of a conversation share; None if nothing tells them.

        It is the client's name of the conversation, or else its first message that is not the
        system's, with the media in it.
        """
        for name in NAMES:
            if isinstance(value := body.get(name), str) and value:
                return self._hash(name.encode(), value.encode("utf-8", "surrogatepass"))
        for field_name in ("messages", "input"):
            messages = body.get(field_name)
            if isinstance(messages, list):
                break
        else:
            return None
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or message.get("role") in ("system", "developer"):
                continue
            media = [
                item_hash.to_bytes(8, "big")
                for item, item_hash in hashes.items()
                if item.path[:2] == (field_name, index)
            ]
            return self._hash(b"first", *_texts(message.get("content")), *media)
        return None


def _identity(found: Any) -> bytes | memoryview:
    """Return what equal items share: their base64 text, their URL, or the client's name."""
    if isinstance(found, Inline):
        return found.base64
    return (found.url if isinstance(found, Remote) else found.uuid).encode("utf-8", "surrogatepass")


def _pixels(item: MMItem, found: Any) -> int:
    """Return the pixels of a picture in the request; 0 if they are not known."""
    if item.modality == "image" and isinstance(found, Inline):
        with suppress(ValueError):
            if (size := image_size(found.read)) is not None:
                return math.prod(size)
    return 0


def _tokens(pixels: Mapping[MMItem, int], reported: Mapping[str, int]) -> dict[MMItem, float]:
    """Divide the tokens of each modality among its items: by their pixels if those are known."""
    tokens = dict[MMItem, float]()
    for modality, total in reported.items():
        parts = {item: pixels[item] for item in pixels if item.modality == modality}
        if not all(parts.values()):
            parts = dict.fromkeys(parts, 1)
        whole = sum(parts.values())
        tokens |= {item: total * part / whole for item, part in parts.items()}
    return tokens


def _texts(content: Any) -> Sequence[bytes]:
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return [text.encode("utf-8", "surrogatepass") for text in texts if isinstance(text, str)]


class Counter:
    """Thread that counts requests. The caller never waits for it.

    Attributes:
        traffic: what has been counted; to be read under `lock`.
        dropped: requests that were not counted, because the thread was behind.
    """

    def __init__(self, traffic: Traffic, pending_bytes: int = PENDING_BYTES) -> None:
        self.traffic = traffic
        self.lock = threading.Lock()
        self.dropped = 0
        self._most_bytes = pending_bytes
        self._offered_bytes = 0  # written by the caller alone
        self._counted_bytes = 0  # written by the thread alone
        self._queue: queue.SimpleQueue[Observed | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="observe", daemon=True)
        self._thread.start()

    def offer(self, observed: Observed) -> None:
        """Have a request counted if there is room for it."""
        offered = self._offered_bytes + len(observed.body)
        if offered - self._counted_bytes > self._most_bytes:
            self.dropped += 1
            return
        self._offered_bytes = offered
        self._queue.put(observed)

    def close(self, timeout_s: float = 5.0) -> None:
        """Count what waits, for at most `timeout_s` seconds, and end the thread."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (observed := self._queue.get()) is not None:
            with self.lock:
                try:
                    self.traffic.count(observed)
                except Exception:  # noqa: BLE001 - the report says how many are not counted
                    self.traffic.unreadable += 1
            self._counted_bytes += len(observed.body)
