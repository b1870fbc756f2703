"""What is remembered of fetched media, and for how long, as RFC 9111 has it for shared caches.

Nothing is served without the origin's word that it is still right: no heuristic freshness
(section 4.2.2), nothing stale (4.2.4).
"""

import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import NamedTuple
from urllib.request import parse_http_list

HEADERS = ("Age", "Cache-Control", "Date", "ETag", "Expires", "Last-Modified", "Vary")
"""Response headers that freshness and validation depend on."""

ETAG = re.compile(r'(W/)?"[\x21\x23-\x7e]*"')
MAX_SECONDS = 2**31
"""A larger max-age is this one (RFC 9111, section 1.2.2)."""

ENTRY_OVERHEAD_BYTES = 1024
"""What an entry takes beside its media; many small ones must count too."""

Headers = Mapping[str, str]


class CacheKey(NamedTuple):
    """What a stored answer is an answer to.

    Attributes:
        scope: who may share it; empty: every client.
        modality: decides the `Accept` it was asked with.
        url: as the request names it.
    """

    scope: str
    modality: str
    url: str


class Media(NamedTuple):
    """Media as a `data:` URL in two parts.

    Attributes:
        head: all up to the comma.
        base64: the rest. Nothing changes it.
    """

    head: str
    base64: bytearray

    @property
    def size(self) -> int:
        """Characters of the URL."""
        return len(self.head) + len(self.base64)


@dataclass(frozen=True, slots=True)
class Entry:
    """Media as they were fetched.

    Attributes:
        media: the media.
        url: where they came from in the end, after redirects; its validators are asked there.
        headers: those of `HEADERS` that it said.
        fresh_until: on the caller's clock; before it they may be used without asking.
    """

    media: Media
    url: str
    headers: Headers
    fresh_until: float

    @property
    def cost_bytes(self) -> int:
        """What keeping it takes."""
        return self.media.size + ENTRY_OVERHEAD_BYTES


class MediaCache:
    """Entries within a budget of bytes; the least recently used goes first.

    Attributes:
        max_bytes: the budget; another holds from the next entry on.
        size_bytes: of all entries.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[CacheKey, Entry] = OrderedDict()
        self.size_bytes = 0

    def get(self, key: CacheKey) -> Entry | None:
        """The entry, which counts as its use."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: CacheKey, entry: Entry) -> None:
        """Keep it, if it fits at all."""
        self.drop(key)
        self._entries[key] = entry
        self.size_bytes += entry.cost_bytes
        while self.size_bytes > self.max_bytes:
            self.drop(next(iter(self._entries)))

    def drop(self, key: CacheKey) -> None:
        """Forget it, if it is there."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.size_bytes -= entry.cost_bytes


def may_keep(headers: Headers, scope: str) -> bool:
    """Whether an answer may be remembered.

    What is `private` is for one user: it is kept within a tenant's scope, and not where all
    clients share one.
    """
    said = _directives(headers)
    if "no-store" in said or "*" in headers.get("Vary", ""):
        return False
    return bool(scope) or "private" not in said


def fresh_s(headers: Headers) -> float:
    """For how many seconds from its request an answer may be used without asking again."""
    said = _directives(headers)
    if "no-cache" in said or "no-store" in said:
        return 0
    for name in ("s-maxage", "max-age"):
        if name in said:
            lifetime: float = _seconds(said[name])
            break
    else:
        lifetime = _until_expiry(headers)
    age = _seconds(headers["Age"]) if "Age" in headers else 0
    return max(0, lifetime - age)


def conditional(headers: Headers) -> dict[str, str]:
    """Request headers that ask whether an answer with these headers is still right.

    Empty where the origin gave nothing to tell one version from the next by.
    """
    etag = headers.get("ETag", "")
    if ETAG.fullmatch(etag):
        return {"If-None-Match": etag}
    modified, date = (_date(headers.get(name)) for name in ("Last-Modified", "Date"))
    # Two versions can share a second: a date is a validator only when that second was over as
    # the answer was made (RFC 9110, section 8.8.2.2).
    if modified and date and (date - modified).total_seconds() >= 1:
        return {"If-Modified-Since": headers["Last-Modified"]}
    return {}


def revalidated(old: Headers, new: Headers) -> Headers:
    """The headers of a stored answer after a 304 that had `new` (RFC 9111, section 3.2)."""
    return {name: value for name, value in old.items() if name not in {"Age", "Date"}} | dict(new)


def _directives(headers: Headers) -> dict[str, str]:
    """Directives of Cache-Control; of one that is there twice, the stricter."""
    said: dict[str, str] = {}
    for directive in parse_http_list(headers.get("Cache-Control", "")):
        name, _, value = directive.partition("=")
        name, value = name.strip().lower(), value.strip().strip('"')
        said[name] = value if name not in said else min(value, said[name], key=_seconds)
    return said


def _seconds(text: str) -> int:
    """A number of seconds; 0, which is stale, for what is none."""
    if not (text.isascii() and text.isdigit()):
        return 0
    digits = text.lstrip("0")
    return (
        MAX_SECONDS if len(digits) > len(str(MAX_SECONDS)) else min(int(digits or 0), MAX_SECONDS)
    )


def _until_expiry(headers: Headers) -> float:
    expires, date = (_date(headers.get(name)) for name in ("Expires", "Date"))
    return (expires - date).total_seconds() if expires and date else 0


def _date(text: str | None) -> datetime | None:
    """An HTTP date; None for what is none, such as `Expires: 0`."""
    try:
        found = parsedate_to_datetime(text or "")
    except (ValueError, OverflowError):
        return None
    return found if found.tzinfo is not None else None
