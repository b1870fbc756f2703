"""The keys of clients where the proxy has no keys file: the instances judge them."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

from aiohttp import web

from epd.errors import UpstreamRejected
from epd.flights import Flights
from epd.server.slots import KEYS
from epd.server.visit import VISIT

DENIED = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
"""Statuses of a request whose key is not accepted."""

ACCEPTED_S = 10.0
"""How long it is remembered that an instance has accepted a key."""

MAX_KEYS = 1024
"""Upper bound of the keys that are remembered."""


class KeyJudge:
    """Asks the instances whether they accept a client's key.

    That a key was accepted is remembered by the key's digest; a refusal is not. Instances
    that need no key accept every request.
    """

    def __init__(self, ask: Callable[[Mapping[str, str]], Awaitable[object]]) -> None:
        """Judge keys by what an instance answers.

        Args:
            ask: sends an instance a request with these headers; raises `UpstreamRejected` where the
                answer is an error.
        """
        self._ask = ask
        self._until_s: dict[bytes, float] = {}
        self._asking: Flights[bytes, None] = Flights()

    async def check(self, headers: Mapping[str, str]) -> None:
        """Return if the instances accept the key in these headers.

        Raises:
            UpstreamRejected: 401 or 403, an instance does not accept it.
            ProxyError: no instance could be asked.
        """
        key = hashlib.sha256(headers.get("Authorization", "").encode("utf-8", "surrogateescape"))
        digest = key.digest()
        if self._until_s.get(digest, 0.0) <= asyncio.get_running_loop().time():
            await self._asking.join(digest, lambda: self._judge(digest, headers))

    async def _judge(self, digest: bytes, headers: Mapping[str, str]) -> None:
        try:
            await self._ask(headers)
        except UpstreamRejected as error:
            # vLLM looks at the key first: another 4xx is the answer to a request that it let in.
            if error.status in DENIED or error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise
        self._until_s.pop(digest, None)  # to be the last again
        self._until_s[digest] = asyncio.get_running_loop().time() + ACCEPTED_S
        if len(self._until_s) > MAX_KEYS:
            del self._until_s[next(iter(self._until_s))]


JUDGE = web.AppKey("judge", KeyJudge)


async def check_key(request: web.Request) -> None:
    """Have an instance judge the client's key before the proxy answers a request by itself.

    With a keys file the proxy has judged it already. What goes on to an instance is judged there.

    Raises:
        ProxyError: the instance does not accept the key, or none could be asked.
    """
    visit = request[VISIT]
    if visit.app.get(KEYS) is None:
        await visit.app[JUDGE].check(visit.context.headers)
