"""Prompt of a request as a chain of digests, by which prefix caches are compared. Pure.

The chain follows the order in which chat templates render a request: the fields on which the whole
prompt depends, tools, the system prompt, then messages and their parts. A media item counts by its
key, long text in pieces. No tokenizer is needed: text counts by its bytes, and media by the
placeholder metadata of their encoder outputs.

The digests are the same in every process. They are no secrets, but they include the `cache_salt`,
which the proxy derives from the tenant: isolated tenants have no link in common.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from xxhash import xxh3_64_intdigest

from epd.api.body import dump_json
from epd.api.items import MM_KWARGS, Body, Path
from epd.api.prompts import BYTES_PER_TOKEN
from epd.kv_events.markers import marker_of, sampled_prefix
from epd.request.item_tokens import TYPICAL_TOKENS, media_tokens
from epd.request.request import Request
from epd.routing.prefix import NO_PREFIX, Prefix
from epd.transfer.encoded import EncodedItem, Prompt

PIECE_BYTES = 1024
"""Size of the pieces of long text."""

MAX_LINKS = 1024
"""Upper bound of the links of a prompt. The rest of a longer one is ignored."""

ROOT = (
    "model",
    "cache_salt",
    *MM_KWARGS,
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
)
"""Fields on which the whole prompt depends, or the KV blocks of the whole prompt."""

FIELDS = {
    name: 1 + index << 32
    for index, name in enumerate(("tools", "system", "instructions", "messages", "input", "prompt"))
}
"""Fields with the prompt, in the order in which they are rendered, each with its marker."""

MEDIA, LATER, PART = 1 << 16, 1 << 17, 1 << 18
"""Marks of a media item, of the pieces of a text after its first, and of a part beside a message.

By its marker and the depth of its place, the digest of data differs from equal data elsewhere.
"""

CONTENTS = ("text", "content", "output")
"""Fields of a message or a part with its content, which follow the others."""

SESSION = "session_id"
"""Field of a request with its session, which precedes vLLM's header."""

FEWEST = 2
"""Number of the fields of most messages and parts: role and content, type and text."""


def request_prefix(request: Request, encoded_items: Sequence[EncodedItem] = ()) -> Prefix:
    """Return the prompt of a request; `NO_PREFIX` if its endpoint generates no tokens.

    `encoded_items` is empty before the encode.
    """
    if not request.endpoint.generates:
        return NO_PREFIX
    tokens = {each.item.path: media_tokens(each.facts.metadata) for each in encoded_items}
    media = {
        item.path: (item.identity, tokens.get(item.path) or TYPICAL_TOKENS[item.modality])
        for item in request.items
    }
    chain = Chain(request.body, media)
    prefix = Prefix(chain.links, chain.ends, request.session)
    return sampled_prefix(prefix) if request.config.kv_events else prefix


def marked_prompt(prompt: Prompt, prefix: Prefix) -> Prompt:
    """Return the prompt with its marker, by which KV events name it.

    The marker takes the place of the client's session, which vLLM only repeats in these events.
    """
    marker = marker_of(prefix)
    if SESSION in prompt.body:
        prompt = prompt._replace(body={**prompt.body, SESSION: marker})
    return prompt._replace(mark=marker)


class Chain:
    """The chain of a request: digests, and the estimated tokens up to the end of each.

    `media` has the key and the tokens of each media item, by its place.
    """

    __slots__ = ("_bytes", "_digest", "_media", "_media_tokens", "ends", "links")

    def __init__(self, body: Body, media: Mapping[Path, tuple[str, int]]) -> None:
        self.links: list[int] = []
        self.ends: list[int] = []
        self._media = media
        self._media_tokens = self._bytes = 0
        self._digest = xxh3_64_intdigest(dump_json([*map(body.get, ROOT)]))
        for field, marker in FIELDS.items():
            if (value := body.get(field)) is not None:
                self._digest ^= marker
                self._add(dump_json(value) if field == "tools" else value, (field,), 1)

    def _add(self, value: Any, path: Path, depth: int) -> None:
        """Add a text, a message, a part, a list of them, or token ids.

        `path` is its place, which is kept only for requests with media; `depth` the place's length.
        """
        if isinstance(value, str):
            self._add_text(value.encode(), depth)
        elif isinstance(value, list) and not (value and isinstance(value[0], int)):
            media, depth = self._media, depth + 1
            for index, inner in enumerate(value):
                where = (*path, index) if media else path
                if media and (item := media.get(where)) is not None:
                    self._add_media(*item, depth)
                elif isinstance(inner, dict):
                    self._add_fields(inner, where, depth)
                else:
                    self._add(inner, where, depth)
        else:
            self._add_text(value if isinstance(value, bytes) else dump_json(value), depth)

    def _add_fields(self, value: Mapping[str, Any], path: Path, depth: int) -> None:
        """Add a message or a part: first the fields that are not its content."""
        if len(value) == FEWEST:
            name, content = value.get("role"), value.get("content")
            if name is None:
                name, content, depth = value.get("type"), value.get("text"), depth | PART
            if isinstance(name, str) and isinstance(content, str):
                head = name.encode()
                self._digest = xxh3_64_intdigest(head, self._digest ^ depth)
                self._bytes += len(head)
                self._add_text(content.encode(), depth + 1)
                return
        others = {key: value[key] for key in value if key not in CONTENTS}
        head = dump_json(others, sort_keys=True)
        self._digest = xxh3_64_intdigest(head, self._digest ^ depth)
        self._bytes += len(head)
        for field in CONTENTS:
            if (content := value.get(field)) is not None:
                self._add(content, (*path, field), depth + 1)

    def _add_media(self, key: str, tokens: int, depth: int) -> None:
        self._digest = xxh3_64_intdigest(key.encode(), self._digest ^ depth ^ MEDIA)
        self._media_tokens += tokens
        if len(self.links) < MAX_LINKS:
            self.links.append(self._digest)
            self.ends.append(self._bytes // BYTES_PER_TOKEN + self._media_tokens)

    def _add_text(self, text: bytes | memoryview, depth: int) -> None:
        """Add a text, in pieces if it is long."""
        if len(text) <= PIECE_BYTES:
            self._digest = xxh3_64_intdigest(text, self._digest ^ depth)
            self._bytes += len(text)
            if len(self.links) < MAX_LINKS:  # as in `_add_media`: a call costs as much as a digest
                self.links.append(self._digest)
                self.ends.append(self._bytes // BYTES_PER_TOKEN + self._media_tokens)
            return
        view = memoryview(text)
        for start in range(0, len(text), PIECE_BYTES):
            if len(self.links) == MAX_LINKS:
                return
            self._add_text(view[start : start + PIECE_BYTES], depth)
            depth |= LATER
