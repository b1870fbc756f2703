"""Private names of aiohttp that the proxy uses, each under a name of the proxy's.

A minor release of aiohttp may remove them: `tests/edge/test_aiohttp_private.py` names each, and
`pyproject.toml` bounds the version.
"""

import asyncio
from abc import abstractmethod

from aiohttp import web
from aiohttp.helpers import rfc822_formatted_time as http_date
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import _ErrInfo

__all__ = ["AppRunner", "BaseSite", "RequestHandler", "http_date"]


class RequestHandler(web.RequestHandler):
    """Connection of aiohttp, with the state of its parser."""

    __slots__ = ()

    @property
    def parsed(self) -> int:
        """Number of heads and errors that the parser has found."""
        return self._request_count

    @property
    def is_between_requests(self) -> bool:
        return self._waiter is not None

    @property
    def has_queued(self) -> bool:
        return bool(self._messages)

    def newest(self) -> tuple[bool, StreamReader]:
        """Return whether the parser's latest find is an error, and the find's body."""
        message, payload = self._messages[-1]
        return isinstance(message, _ErrInfo), payload

    def queue_error(self, status: int, error: BaseException, message: str) -> None:
        """Have an error answered after the requests before it, as errors of the parser are."""
        self._messages.append((_ErrInfo(status, error, message), EMPTY_PAYLOAD))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AppRunner(web.AppRunner):
    """Runner of an application on a server of another class."""

    @abstractmethod
    def replaced(self, made: web.Server) -> web.Server:
        """Return the server to use instead of the one that aiohttp has made."""

    async def _make_server(self) -> web.Server:
        return self.replaced(await super()._make_server())


class BaseSite(web.BaseSite):
    """Listening address on a server of another class."""

    @abstractmethod
    async def listen(self) -> asyncio.AbstractServer:
        """Return a server that listens; aiohttp closes it when the site stops."""

    async def start(self) -> None:
        """Listen on the address.

        Raises:
            OSError: the address cannot be listened on.
        """
        await super().start()
        self._server = await self.listen()
