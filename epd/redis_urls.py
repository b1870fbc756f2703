"""Clients of Redis by the URLs of settings, checked in `epd.routing.urls`."""

from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

import redis.asyncio
from redis.asyncio.retry import Retry

MAX_CONNECTIONS = 8
"""Of one client. Who finds none free waits: to connect takes longer than many an answer."""


def redis_client(
    url: str, key: str, timeout_s: float, retry: Retry | None = None
) -> tuple[Any, str]:
    """A client that connects when it is asked, and the key that the URL names, or `key`.

    Args:
        url: with a `key` parameter, or without.
        key: what is used without.
        timeout_s: of a connect, and of each wait for an answer.
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
        timeout=timeout_s,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        protocol=2,
        **more,
    )
    return redis.asyncio.Redis.from_pool(pool), key
