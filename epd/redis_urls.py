"""Clients of Redis by the URLs of settings, checked in `epd.routing.urls`."""

from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.exceptions import RedisError

CONNECT_S = 2.0
"""Of a connect, and of the close of a connection."""

MAX_CONNECTIONS = 8
"""Of one client. Who finds none free waits: to connect takes longer than many an answer."""


def redis_client(url: str, key: str, retry: Retry | None = None) -> tuple[Any, str]:
    """A client that connects when it is asked, and the key that the URL names, or `key`.

    It waits for answers without an end: whoever asks does so `within` a time. With a timeout of
    its own, redis-py sends by `asyncio.wait_for`, which loses cancellations in Python 3.11 and
    starts a task there each time.

    Args:
        url: with a `key` parameter, or without.
        key: what is used without.
        retry: what is tried again; None: what redis-py thinks right.
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
    """Let go of a client's connections: a Redis that hangs does not say TLS's goodbye."""
    with suppress(RedisError, OSError):
        await client.aclose()
