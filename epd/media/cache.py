"""Cache of fetched media, with the lifetimes of RFC 9111 for shared caches.

An entry is used only while the origin has declared it valid: no heuristic freshness (section
4.2.2), nothing stale (4.2.4).
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
"""Response headers that determine freshness and validation."""

ETAG = re.compile(r'(W/)?"[\x21\x23-\x7e]*"')
MAX_SECONDS = 2**31
"""Upper bound of max-age (RFC 9111, section 1.2.2)."""

ENTRY_OVERHEAD_BYTES = 1024
"""Size of an entry beside its media. It bounds the number of small entries."""

Headers = Mapping[str, str]


class CacheKey(NamedTuple):
    """The request to which a stored answer belongs.

    Attributes:
        scope: name of the tenant that may use it; empty for every client.
        modality: modality, which determines the `Accept` header of the request.
        url: URL in the client's request.
    """

    scope: str
    modality: str
    url: str


class Media(NamedTuple):
    """Media as a `data:` URL: the text up to the comma, and the rest, which must not change."""

    head: str
    base64: bytearray

    @property
    def size(self) -> int:
        return len(self.head) + len(self.base64)


@dataclass(frozen=True, slots=True)
class CachedMedia:
    """Fetched media with their validators.

    Attributes:
        url: final URL after redirects, to which revalidation requests go.
        headers: headers of `HEADERS` in its answer.
        fresh_until: time until which they may be used without revalidation, on the caller's clock.
    """

    media: Media
    url: str
    headers: Headers
    fresh_until: float

    @property
    def cost_bytes(self) -> int:
        return self.media.size + ENTRY_OVERHEAD_BYTES


class MediaCache:
    """Entries within a budget of bytes; the least recently used is evicted first.

    Attributes:
        size_bytes: size of all entries.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[CacheKey, CachedMedia] = OrderedDict()
        self.size_bytes = 0

    def get(self, key: CacheKey) -> CachedMedia | None:
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: CacheKey, entry: CachedMedia) -> None:
        """Store an entry, unless it exceeds the whole budget."""
        self.drop(key)
        self._entries[key] = entry
        self.size_bytes += entry.cost_bytes
        while self.size_bytes > self._max_bytes:
            self.drop(next(iter(self._entries)))

    def drop(self, key: CacheKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.size_bytes -= entry.cost_bytes


def may_keep(headers: Headers, scope: str) -> bool:
    """Return whether an answer may be stored.

    A `private` answer is for one user: it is stored within a tenant's scope, but not in a scope
    that all clients share.
    """
    directives = _directives(headers)
    if "no-store" in directives or "*" in headers.get("Vary", ""):
        return False
    return bool(scope) or "private" not in directives


def fresh_s(headers: Headers) -> float:
    """Return the seconds from its request for which an answer may be used without revalidation."""
    directives = _directives(headers)
    if "no-cache" in directives or "no-store" in directives:
        return 0
    max_age = directives.get("s-maxage", directives.get("max-age"))
    if max_age is not None:
        lifetime: float = _seconds(max_age)
    else:
        expires, date = (_date(headers.get(name)) for name in ("Expires", "Date"))
        lifetime = (expires - date).total_seconds() if expires and date else 0
    return max(0, lifetime - _seconds(headers.get("Age", "")))


def revalidation_headers(headers: Headers) -> dict[str, str]:
    """Return the request headers that revalidate an answer; none without a usable validator."""
    etag = headers.get("ETag", "")
    if ETAG.fullmatch(etag):
        return {"If-None-Match": etag}
    modified, date = (_date(headers.get(name)) for name in ("Last-Modified", "Date"))
    # Two versions can have the same second: a date is a validator only if that second had passed
    # when the answer was made (RFC 9110, section 8.8.2.2).
    if modified and date and (date - modified).total_seconds() >= 1:
        return {"If-Modified-Since": headers["Last-Modified"]}
    return {}


def revalidated_headers(old: Headers, new: Headers) -> Headers:
    """Return the headers of a stored answer after a 304 with `new` (RFC 9111, section 3.2)."""
    return {name: value for name, value in old.items() if name not in {"Age", "Date"}} | dict(new)


def _directives(headers: Headers) -> dict[str, str]:
    """Return the directives of Cache-Control; the stricter one of duplicates."""
    directives: dict[str, str] = {}
    for directive in parse_http_list(headers.get("Cache-Control", "")):
        name, _, value = directive.partition("=")
        name, value = name.strip().lower(), value.strip().strip('"')
        directives[name] = min(value, directives.get(name, value), key=_seconds)
    return directives


def _seconds(text: str) -> int:
    """Return a number of seconds; 0, which means stale, for invalid text."""
    if not (text.isascii() and text.isdigit()):
        return 0
    digits = text.lstrip("0")[: 1 + len(str(MAX_SECONDS))]  # further ones make it no smaller
    return min(int(digits or 0), MAX_SECONDS)


def _date(text: str | None) -> datetime | None:
    """Return an HTTP date; None for an invalid one, such as `Expires: 0`."""
    try:
        found = parsedate_to_datetime(text or "")
    except (ValueError, OverflowError):
        return None
    return found if found.tzinfo is not None else None
