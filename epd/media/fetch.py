"""Remote media: fetched by the engines, or fetched by the proxy and inlined into the request."""

import asyncio
import base64
import re
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Self
from urllib.request import proxy_bypass

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from epd.aio import Flights, gather_first
from epd.api.body import Cuts, join_cuts
from epd.api.items import Body, MMItem, with_parts
from epd.config.sections import ConfigFields
from epd.errors import BadRequest, MediaFetchFailed, ProxyError
from epd.media.cache import (
    HEADERS,
    CachedMedia,
    CacheKey,
    Headers,
    Media,
    MediaCache,
    fresh_s,
    may_keep,
    revalidated_headers,
    revalidation_headers,
)
from epd.media.forward_proxy import forward_proxies
from epd.media.memory_count import MemoryCount
from epd.media.names import LOOKUP_S, CheckedResolver, HostNames, NoAllowedAddress
from epd.media.parts import GROUP, GROUP_BYTES, Remote, source
from epd.media.policy import NO_ADDRESS, NO_NAME_OR_ADDRESS, check_url, refused_url
from epd.media.slots import REQUEST_SLOTS, DownloadSlots
from epd.version import __version__

MAX_REDIRECTS = 3
CONNECT_S = 3.0
SILENT_S = 5.0

REDIRECTS = frozenset({301, 302, 303, 307, 308})
TRANSIENT = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})
MEDIA_TYPE = re.compile(r"(image|audio|video)/[a-z0-9][a-z0-9.+-]{0,62}")
UNKNOWN_TYPE = "application/octet-stream"
"""Replacement of an invalid media type. Engines detect pictures and sounds by their content."""


class NotAtOrigin(MediaFetchFailed):
    """The origin does not have the media, or denies them to this proxy."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaFetcher:
    """Fetches and caches `http` and `https` media. Exists only with `--media-fetch proxy`.

    Only `_proxied` may connect to any address: those of forward proxies.
    """

    _direct: aiohttp.ClientSession
    _proxied: aiohttp.ClientSession
    _config: ConfigFields
    _proxies: Mapping[str, URL]
    _cache: MediaCache
    _flights: Flights[CacheKey, Media] = field(default_factory=Flights)
    _slots: DownloadSlots = field(default_factory=DownloadSlots)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        config: ConfigFields,
        resolver: AbstractResolver | None = None,
        *,
        connect_s: float = CONNECT_S,
        silent_s: float = SILENT_S,
    ) -> AsyncIterator[Self]:
        """Return a fetcher with connection pools of its own, which are closed at the exit.

        Args:
            config: the configuration.
            resolver: resolver of host names; None for the machine's.
            connect_s: timeout of a connect to one address, including the TLS handshake, in seconds.
            silent_s: time for which an origin may send nothing, before its answer or within it.
        """
        names = resolver or HostNames()
        proxies = forward_proxies() if config.media_fetch_trust_env else {}
        timeout = aiohttp.ClientTimeout(
            total=None,
            # With its lookup, to all addresses or through a forward proxy.
            connect=LOOKUP_S + connect_s + silent_s,
            sock_connect=connect_s,
            sock_read=silent_s,
        )
        async with (
            _session(CheckedResolver(config, names), timeout) as direct,
            _session(names, timeout) as proxied,
        ):
            fetcher = cls(direct, proxied, config, proxies, MediaCache(config.media_cache_bytes))
            try:
                yield fetcher
            finally:
                await fetcher._flights.close()

    async def inline_media(
        self, body: Body, items: Sequence[MMItem], cuts: Cuts, memory: MemoryCount
    ) -> tuple[Body, Cuts]:
        """Return the body with `data:` URLs in place of `http` and `https` ones, and its cuts.

        At most `REQUEST_SLOTS` URLs are fetched at a time. The total size of all items is limited
        like that of a body with media. The scope of `memory` separates the cache of tenants.

        Raises:
            ProxyError: an item failed; the other fetches are cancelled.
        """
        remote = {  # `file:` URLs are left to the engines
            item: found.url
            for item in items
            if isinstance(found := source(item), Remote) and found.path is None
        }
        if not remote:
            return body, cuts
        size, limit = 0, self._config.worker_max_body_bytes
        same: dict[tuple[str, str], list[MMItem]] = {}
        for item, url in remote.items():
            same.setdefault((url, item.modality), []).append(item)

        async def fetch_items(items: list[MMItem]) -> Media:
            nonlocal size
            try:
                medium = await self.fetch(remote[items[0]], items[0].modality, memory)
                size += medium.size * len(items)
                if size > limit:
                    raise BadRequest(
                        f"the total size of the request's media exceeds {limit} bytes as base64",
                        slug="media_too_large",
                    )
                memory.add(medium.size * len(items))
            except ProxyError as error:
                raise error.at_param(items[0].media_param) from error.__cause__
            return medium

        fetched = await gather_first(fetch_items, same.values(), REQUEST_SLOTS)
        media = {
            item: medium
            for items, medium in zip(same.values(), fetched, strict=True)
            for item in items
        }
        cuts, placeholders = join_cuts(
            cuts, [memoryview(medium.base64) for medium in media.values()]
        )
        parts = {
            item: {
                **item.part,
                item.kind: {**item.part[item.kind], "url": medium.head + placeholder},
            }
            for (item, medium), placeholder in zip(media.items(), placeholders, strict=True)
        }
        return with_parts(body, parts), cuts

    async def fetch(self, url: str, modality: str, memory: MemoryCount) -> Media:
        """Return the media. Until they are complete, their memory is counted apart from `memory`.

        Concurrent calls with the same scope and URL share one download, regardless of the origin's
        cache headers.

        Raises:
            BadRequest: the URL is not allowed, or the media are too large.
            MediaFetchFailed: the origin does not have the media, failed, or timed out.
            TryLater: the memory limit is reached, or other downloads have all slots for too long.
        """
        target = check_url(self._config, url)
        key = CacheKey(memory.scope, modality, str(target))
        known = self._cache.get(key)
        if known is not None and _now() < known.fresh_until:
            return known.media
        return await self._flights.join(key, partial(self._load, key, target, known, memory))

    async def _load(
        self, key: CacheKey, target: URL, known: CachedMedia | None, memory: MemoryCount
    ) -> Media:
        limit_s = self._config.media_timeout_s
        try:
            # The download outlives its first request if other requests wait for it.
            # The wait for a slot does not count as time of the origin.
            async with self._slots.slot(key.scope, limit_s):
                async with asyncio.timeout(limit_s):
                    with memory.separate_count() as download_memory:
                        entry = await self._download(target, key, known, download_memory)
        except TimeoutError:
            raise MediaFetchFailed("the origin did not send the media in time") from None
        except (BadRequest, NotAtOrigin):
            self._cache.drop(key)
            raise
        if may_keep(entry.headers, key.scope):
            self._cache.put(key, entry)
        else:
            self._cache.drop(key)
        return entry.media

    async def _download(
        self, url: URL, key: CacheKey, known: CachedMedia | None, memory: MemoryCount
    ) -> CachedMedia:
        """Follow redirects, and read the final answer or find it unchanged."""
        sent_s = _now()
        fresh = float("inf")
        for _ in range(MAX_REDIRECTS + 1):
            stored = known if known is not None and known.url == str(url) else None
            headers = revalidation_headers(stored.headers) if stored else {}
            headers["Accept"] = f"{key.modality}/*"
            async with self._answer(url, headers) as response:
                received = response.headers
                cache_headers: Headers = {
                    name: ",".join(received.getall(name)) for name in HEADERS if name in received
                }
                location = received.get("Location")
                if response.status in REDIRECTS and location:
                    # The result is at most as fresh as the redirects to it.
                    may_store = may_keep(cache_headers, key.scope)
                    fresh = min(fresh, fresh_s(cache_headers) if may_store else 0)
                    url = check_url(self._config, location, base=url)
                    continue
                if response.status == HTTPStatus.NOT_MODIFIED and stored is not None:
                    media = stored.media
                    cache_headers = revalidated_headers(stored.headers, cache_headers)
                else:
                    media = await self._read(response, key.modality, memory)
            fresh_until = sent_s + min(fresh, fresh_s(cache_headers))
            return CachedMedia(media, str(url), cache_headers, fresh_until)
        raise NotAtOrigin(f"the origin redirects more than {MAX_REDIRECTS} times")

    @asynccontextmanager
    async def _answer(
        self, url: URL, headers: dict[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        proxy = self._proxies.get(url.scheme)
        if proxy and proxy_bypass(f"{(url.host_subcomponent or '').rstrip('.')}:{url.port}"):
            proxy = None
        session = self._direct if proxy is None else self._proxied
        with _translated(proxy, listed=bool(self._config.allowed_media_domains)):
            async with session.get(
                url, headers=headers, allow_redirects=False, proxy=proxy
            ) as response:
                status = response.status
                if proxy is not None and status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:
                    raise MediaFetchFailed(f"the forward proxy answered {status}")
                yield response

    async def _read(
        self, response: aiohttp.ClientResponse, modality: str, memory: MemoryCount
    ) -> Media:
        """Return the body of a 200.

        Its memory counts twice as received, up to its announced length: an origin that announces
        a body and does not send it reserves nothing.
        """
        _check_head(response)
        config = self._config
        limit = min(config.max_media_bytes, config.worker_max_body_bytes // GROUP * GROUP_BYTES)
        length = response.content_length or 0
        if length > limit:
            raise _too_large(limit)
        text, rest, size, counted = bytearray(), b"", 0, 0
        # In pieces: encoding everything at once would hold the interpreter's lock.
        async for chunk in response.content.iter_any():
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            rest += chunk
            whole = len(rest) // GROUP_BYTES * GROUP_BYTES  # whole groups can be concatenated
            groups = -(-max(size, min(length, 2 * size)) // GROUP_BYTES)
            if (now := groups * GROUP) > counted:
                memory.add(now - counted)
                counted = now
            text += base64.b64encode(rest[:whole])
            rest = rest[whole:]
        text += base64.b64encode(rest)
        return Media(_data_url_head(response, modality), text)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _check_head(response: aiohttp.ClientResponse) -> None:
    status = response.status
    if status // 100 == 4 and status not in TRANSIENT:  # noqa: PLR2004
        raise NotAtOrigin(f"the origin answered {status}")
    if status != HTTPStatus.OK:
        raise MediaFetchFailed(f"the origin answered {status}")
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise MediaFetchFailed("the origin's answer has an unsupported encoding")


def _data_url_head(response: aiohttp.ClientResponse, modality: str) -> str:
    media_type = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    known = MEDIA_TYPE.fullmatch(media_type) and media_type.startswith(f"{modality}/")
    return f"data:{media_type if known else UNKNOWN_TYPE};base64,"


def _too_large(limit: int) -> BadRequest:
    return BadRequest(f"the media exceed {limit} bytes", slug="media_too_large")


def _session(resolver: AbstractResolver, timeout: aiohttp.ClientTimeout) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            resolver=resolver,
            # Each connection uses addresses that were checked for it.
            use_dns_cache=False,
            limit=0,  # `DownloadSlots` limits the downloads
        ),
        timeout=timeout,
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"User-Agent": f"epd/{__version__}", "Accept-Encoding": "identity"},
        # aiohttp would decompress data after the head, of any size, before it can be rejected.
        auto_decompress=False,
        trust_env=False,
    )


@contextmanager
def _translated(proxy: URL | None, *, listed: bool) -> Iterator[None]:
    """Convert aiohttp's errors to errors of the proxy.

    Their messages contain addresses and whole URLs: only their type names reach the log. `listed`
    is whether clients can name only the hosts of a list.
    """
    peer = "origin" if proxy is None else "forward proxy"
    try:
        yield
    except TimeoutError:
        raise MediaFetchFailed(f"the {peer} did not answer in time") from None
    except aiohttp.ClientConnectorDNSError as error:
        if error.errno == socket.EAI_AGAIN:
            raise MediaFetchFailed(
                "the name servers did not answer for the host's name; retry later"
            ) from None
        if proxy is not None:
            raise MediaFetchFailed("the forward proxy's name does not exist") from None
        if not listed:
            # The same error for both, so that clients cannot probe internal names.
            raise refused_url(NO_NAME_OR_ADDRESS) from None
        refused = isinstance(error.os_error, NoAllowedAddress)
        raise refused_url(NO_ADDRESS if refused else "the host's name does not exist") from None
    except aiohttp.InvalidURL:
        raise refused_url("not a valid URL") from None
    except aiohttp.ClientHttpProxyError as error:
        raise MediaFetchFailed(f"the forward proxy answered {error.status}") from None
    except aiohttp.ClientConnectorError as error:
        raise MediaFetchFailed(f"the {peer} is unreachable") from _named(error)
    except (aiohttp.ClientError, OSError) as error:
        raise MediaFetchFailed(f"the connection to the {peer} broke") from _named(error)


def _named(error: Exception) -> OSError:
    return OSError(type(error).__name__)
