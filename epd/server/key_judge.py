"""Check of clients' keys by the instances, for responses of the proxy itself."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

from aiohttp import web

from ec_store.bounded import BoundedDict
from epd.aio import Flights
from epd.errors import UpstreamRejected
from epd.server.app_keys import KEYS, VISIT

DENIED = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
"""HTTP statuses with which an instance rejects a key."""

ACCEPTED_S = 10.0
"""Time to live of a key's acceptance in the cache, in seconds."""

MAX_KEYS = 1024
"""Upper bound of the accepted keys in the cache."""


class KeyJudge:
    """Check of a client's key by a request to an instance.

    An acceptance is cached under the key's digest; a rejection is not cached. Instances without
    `--api-key` accept every request.
    """

    def __init__(
        self, ask: Callable[[Mapping[str, str]], Awaitable[object]], accepted_s: float = ACCEPTED_S
    ) -> None:
        """Check keys by `ask`, which raises `UpstreamRejected` if an instance answers an error."""
        self._ask = ask
        self._accepted_s = accepted_s
        self._until_s: BoundedDict[bytes, float] = BoundedDict(MAX_KEYS)
        self._asking: Flights[bytes, None] = Flights()

    async def check(self, headers: Mapping[str, str]) -> None:
        """Return if the instances accept the key in these headers.

        Raises:
            UpstreamRejected: an instance rejects the key (401 or 403).
            ProxyError: no instance could be reached.
        """
        key = hashlib.sha256(headers.get("Authorization", "").encode("utf-8", "surrogateescape"))
        digest = key.digest()
        if self._until_s.get(digest, 0.0) <= asyncio.get_running_loop().time():
            await self._asking.join(digest, lambda: self._judge(digest, headers))

    async def _judge(self, digest: bytes, headers: Mapping[str, str]) -> None:
        try:
            await self._ask(headers)
        except UpstreamRejected as error:
            # vLLM checks the key first: any other 4xx means that it accepted the key.
            if error.status in DENIED or error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise
        self._until_s[digest] = asyncio.get_running_loop().time() + self._accepted_s


JUDGE = web.AppKey("judge", KeyJudge)


async def check_key(request: web.Request) -> None:
    """Check the client's key at an instance before the proxy answers a request by itself.

    With a keys file the proxy has checked the key already. A request that is forwarded to an
    instance needs no such check: the instance checks the key.

    Raises:
        ProxyError: the instance rejects the key, or no instance could be reached.
    """
    visit = request[VISIT]
    if visit.app.get(KEYS) is None:
        await visit.app[JUDGE].check(visit.headers)
