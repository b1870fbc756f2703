"""Remote media: left to the engines, or fetched here and put into the request."""

import asyncio
import base64
import re
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Self

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from epd.bodies.cuts import Cuts, joined
from epd.bodies.items import Body, MMItem, with_parts
from epd.config import ProxyConfig
from epd.config.live import LiveConfig
from epd.errors import BadRequest, MediaFetchFailed, ProxyError
from epd.flights import Flights
from epd.gather import gather_first
from epd.media.cache import (
    HEADERS,
    CacheKey,
    Entry,
    Headers,
    Media,
    MediaCache,
    conditional,
    fresh_s,
    may_keep,
    revalidated,
)
from epd.media.held import Held, max_body_bytes
from epd.media.parts import Remote, source
from epd.media.policy import NO_ADDRESS, MediaPolicy, refused
from epd.version import __version__

MAX_REDIRECTS = 3
CONNECTIONS = 32
"""Downloads at once."""

CONNECTIONS_PER_HOST = 16
"""So that one slow host does not take all of them."""

BASE64_BYTES = 3
"""What base64 takes at a time; text of whole groups can be joined."""

BASE64_CHARACTERS = 4
"""What it makes of them."""

REDIRECTS = frozenset({301, 302, 303, 307, 308})
TRANSIENT = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})
MEDIA_TYPE = re.compile(r"(image|audio|video)/[a-z0-9][a-z0-9.+-]{0,62}")
UNKNOWN_TYPE = "application/octet-stream"
"""For what an origin names otherwise: engines go by the content of pictures and sounds."""


class NotAtOrigin(MediaFetchFailed):
    """The origin has answered that it does not have the media, or not for this proxy."""


class MediaFetcher:
    """Fetches `http` and `https` media and remembers them, where the engines are not to."""

    def __init__(self, session: aiohttp.ClientSession, live: LiveConfig) -> None:
        self._session = session
        self._live = live
        self._cache = MediaCache(live.current.media_cache_bytes)
        self._flights: Flights[CacheKey, Media] = Flights()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, live: LiveConfig, resolver: AbstractResolver | None = None
    ) -> AsyncIterator[Self]:
        """A fetcher with a connection pool of its own, closed when the context is left."""
        checked = CheckedResolver(live, resolver or aiohttp.DefaultResolver())
        connector = aiohttp.TCPConnector(
            resolver=checked,
            # Every connection is to addresses that were checked for it.
            use_dns_cache=False,
            limit=CONNECTIONS,
            limit_per_host=CONNECTIONS_PER_HOST,
        )
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": f"epd/{__version__}", "Accept-Encoding": "identity"},
            # What comes with the head would be decoded, whatever its size, before it is refused.
            auto_decompress=False,
            trust_env=False,
        ) as session:
            fetcher = cls(session, live)
            try:
                yield fetcher
            finally:
                await fetcher._flights.close()
                await checked.close()

    async def inlined(
        self, body: Body, items: Sequence[MMItem], config: ProxyConfig, cuts: Cuts, held: Held
    ) -> tuple[Body, Cuts]:
        """Return the body with `data:` URLs in place of `http` and `https` ones, and its cuts.

        All items at once; together they may be as large as a body that brings its media. With
        `--media-fetch engine` the body as it is.

        Args:
            body: the request.
            items: its mm items.
            config: the request's.
            cuts: what was cut out of it, as the fetched media are too.
            held: counts them with the request. What is fetched for one tenant is not used for
                another.

        Raises:
            ProxyError: the first item that failed; the others are left.
        """
        if config.media_fetch == "engine" or not (remote := _remote(items)):
            return body, cuts
        total = _Total(max_body_bytes(config), held)

        async def fetched(item: MMItem) -> Media:
            return await self._of_item(item, remote[item], total)

        media = await gather_first(fetched, remote, len(remote))
        cuts, marks = joined(cuts, [memoryview(one.base64) for one in media])
        parts = {
            item: {**item.part, item.kind: {**item.part[item.kind], "url": one.head + mark}}
            for item, one, mark in zip(remote, media, marks, strict=True)
        }
        return with_parts(body, parts), cuts

    @property
    def _policy(self) -> MediaPolicy:
        """As it is configured now."""
        return media_policy(self._live.current)

    async def _of_item(self, item: MMItem, url: str, total: "_Total") -> Media:
        try:
            media = await self.fetch(url, item.modality, total.held)
            total.add(media.size)
        except ProxyError as error:
            raise error.at(item.media_param) from error.__cause__
        return media

    async def fetch(self, url: str, modality: str, held: Held) -> Media:
        """Return the media, which are counted apart from `held` until they are whole.

        Concurrent calls of one scope for one URL are one download, whatever the origin lets
        caches do: they ask for the same at the same time.

        Raises:
            BadRequest: it must not be fetched, or it is too large.
            MediaFetchFailed: the origin does not have it, is broken or late.
            TryLater: there is no memory for it.
        """
        target = self._policy.check(url)
        key = CacheKey(held.scope, modality, str(target))
        known = self._cache.get(key)
        if known is not None and _now() < known.fresh_until:
            return known.media
        return await self._flights.join(key, partial(self._load, key, target, known, held))

    async def _load(self, key: CacheKey, target: URL, known: Entry | None, held: Held) -> Media:
        try:
            # Others may wait for it when the request that it was begun for has gone.
            with _translated(), held.beside() as own:
                async with asyncio.timeout(self._live.current.media_timeout_s):
                    entry = await self._download(target, key, known, own)
        except (BadRequest, NotAtOrigin):
            self._cache.drop(key)
            raise
        if may_keep(entry.headers, key.scope):
            self._cache.max_bytes = self._live.current.media_cache_bytes
            self._cache.put(key, entry)
        else:
            self._cache.drop(key)
        return entry.media

    async def _download(self, url: URL, key: CacheKey, known: Entry | None, held: Held) -> Entry:
        """Follow redirects, and read what they lead to or find it unchanged."""
        asked = _now()
        fresh = float("inf")
        for _ in range(MAX_REDIRECTS + 1):
            ours = known if known is not None and known.url == str(url) else None
            headers = {"Accept": f"{key.modality}/*"} | (conditional(ours.headers) if ours else {})
            async with self._session.get(url, headers=headers, allow_redirects=False) as response:
                said = _cache_headers(response)
                location = response.headers.get("Location")
                if response.status in REDIRECTS and location:
                    # What they lead to is no fresher than the way there.
                    fresh = min(fresh, fresh_s(said) if may_keep(said, key.scope) else 0)
                    url = self._policy.check(location, base=url)
                    continue
                if response.status == HTTPStatus.NOT_MODIFIED and ours is not None:
                    media, said = ours.media, revalidated(ours.headers, said)
                else:
                    media = await self._read(response, key.modality, held)
            return Entry(media, str(url), said, asked + min(fresh, fresh_s(said)))
        raise NotAtOrigin(f"the origin redirects more than {MAX_REDIRECTS} times")

    async def _read(self, response: aiohttp.ClientResponse, modality: str, held: Held) -> Media:
        """Return the body of a 200, counted as it is announced, or as it comes."""
        _check_head(response)
        config = self._live.current
        whole = max_body_bytes(config) // BASE64_CHARACTERS * BASE64_BYTES
        limit = min(config.max_media_bytes, whole)
        if (response.content_length or 0) > limit:
            raise _too_large(limit)
        counted = _base64_size(response.content_length or 0)
        held.add(counted)
        text, rest, size = bytearray(), b"", 0
        # Piece by piece: encoding all of it at once would hold the interpreter's lock.
        async for chunk in response.content.iter_any():
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            rest += chunk
            whole = len(rest) // BASE64_BYTES * BASE64_BYTES
            if (now := _base64_size(size)) > counted:
                held.add(now - counted)
                counted = now
            text += base64.b64encode(rest[:whole])
            rest = rest[whole:]
        text += base64.b64encode(rest)
        return Media(_data_url_head(response, modality), text)


class CheckedResolver(AbstractResolver):
    """Resolves names to the addresses that the policy allows, and no others.

    aiohttp connects to what it is given here and does not resolve again, so that no second answer
    of a name server can differ from the one that was checked.
    """

    def __init__(self, live: LiveConfig, resolver: AbstractResolver) -> None:
        self._live = live
        self._resolver = resolver

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The allowed addresses of the name.

        Raises:
            OSError: it has none.
        """
        found = await self._resolver.resolve(host, port, family)
        policy = media_policy(self._live.current)
        allowed = [address for address in found if policy.allows_address(address["host"])]
        if not allowed:
            raise OSError("no allowed address")
        return allowed

    async def close(self) -> None:
        """Close the resolver behind this one."""
        await self._resolver.close()


@dataclass(slots=True)
class _Total:
    """What one request's media amount to."""

    limit: int
    held: Held
    size: int = field(default=0)

    def add(self, size: int) -> None:
        self.size += size
        if self.size > self.limit:
            raise BadRequest(
                f"the request's media are together larger than {self.limit} bytes as base64",
                slug="media_too_large",
            )
        self.held.add(size)


def _remote(items: Sequence[MMItem]) -> dict[MMItem, str]:
    """Items to fetch; `file:` URLs stay the engines'."""
    sources = {item: source(item) for item in items}
    return {
        item: media.url
        for item, media in sources.items()
        if isinstance(media, Remote) and media.path is None
    }


def media_policy(config: ProxyConfig) -> MediaPolicy:
    """The policy that the flags make."""
    return MediaPolicy(
        allowed_domains=frozenset(config.allowed_media_domains),
        allow_http=config.allow_http_media,
        allow_private=config.allow_private_media,
    )


def _base64_size(size: int) -> int:
    return -(-size // BASE64_BYTES) * BASE64_CHARACTERS


def _now() -> float:
    return asyncio.get_running_loop().time()


def _cache_headers(response: aiohttp.ClientResponse) -> Headers:
    headers = response.headers
    return {name: ",".join(headers.getall(name)) for name in HEADERS if name in headers}


def _check_head(response: aiohttp.ClientResponse) -> None:
    status = response.status
    if status // 100 == 4 and status not in TRANSIENT:  # noqa: PLR2004
        raise NotAtOrigin(f"the origin answered {status}")
    if status != HTTPStatus.OK:
        raise MediaFetchFailed(f"the origin answered {status}")
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise MediaFetchFailed("the origin sent an encoded answer that was not asked for")


def _data_url_head(response: aiohttp.ClientResponse, modality: str) -> str:
    media_type = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    known = MEDIA_TYPE.fullmatch(media_type) and media_type.startswith(f"{modality}/")
    return f"data:{media_type if known else UNKNOWN_TYPE};base64,"


def _too_large(limit: int) -> BadRequest:
    return BadRequest(f"the media are larger than {limit} bytes", slug="media_too_large")


@contextmanager
def _translated() -> Iterator[None]:
    """Turn aiohttp's errors into ours.

    They carry addresses and whole URLs: only their names go on, to the log.
    """
    try:
        yield
    except TimeoutError:
        raise MediaFetchFailed("the media did not come in time") from None
    except aiohttp.ClientConnectorDNSError as error:
        if error.errno == socket.EAI_AGAIN:
            raise MediaFetchFailed("the host's name cannot be resolved now") from None
        # The same for a name that does not exist: which names exist inside is nobody's business.
        raise refused(NO_ADDRESS) from None
    except aiohttp.InvalidURL:
        raise refused("not a valid URL") from None
    except aiohttp.ClientConnectorError as error:
        raise MediaFetchFailed("the origin cannot be reached") from _named(error)
    except (aiohttp.ClientError, OSError) as error:
        raise MediaFetchFailed("the connection to the origin broke") from _named(error)


def _named(error: Exception) -> OSError:
    return OSError(type(error).__name__)
