"""Redis clients for the URLs of settings, which `epd.routing.urls` has checked."""

from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.exceptions import RedisError

CONNECT_S = 2.0
"""Timeout of a connect, and of closing a connection."""

MAX_CONNECTIONS = 8
"""Maximum number of connections of one client. A command waits for a free one: a new connect
often takes longer than an answer."""


def redis_client(url: str, key: str, retry: Retry | None = None) -> tuple[Any, str]:
    """Return a client that connects on first use, and the key of the URL, or else `key`.

    The client waits for answers without a limit, so each caller uses `within`. With a timeout of
    its own, redis-py sends with `asyncio.wait_for`, which in Python 3.11 loses cancellations and
    starts a task for each command.

    Args:
        url: Redis URL, with or without a `key` parameter.
        key: default for a URL without one.
        retry: retry policy; None for redis-py's default.
    """
    parts = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    key = query.pop("key", key)
    bare = urlunsplit(parts._replace(query=urlencode(query)))
    more: dict[str, Any] = {} if retry is None else {"retry": retry}
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        bare,
        max_connections=MAX_CONNECTIONS,
        timeout=None,
        socket_timeout=None,
        socket_connect_timeout=CONNECT_S,
        protocol=2,
        **more,
    )
    return redis.asyncio.Redis.from_pool(pool), key


async def close(client: Any) -> None:
    """Close the connections of a client. A hanging Redis does not answer the TLS shutdown."""
    with suppress(RedisError, OSError):
        await client.aclose()
