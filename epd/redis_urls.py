"""Redis clients for the URLs of settings, which `epd.routing.urls` has checked.

redis-py is imported with the first client: a proxy without a Redis URL does not need its memory,
and redis-py imports OpenTelemetry if that is installed.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

CONNECT_S = 2.0
"""Timeout of a connect, and of closing a connection."""

MAX_CONNECTIONS = 8
"""Maximum number of connections of one client. A command waits for a free one: a new connect
often takes longer than an answer."""


def redis_client(url: str, key: str, *, retry: bool = True) -> tuple[Any, str]:
    """Return a client that connects on first use, and the key of the URL, or else `key`.

    The client waits for answers without a limit, so each caller uses `within`. With a timeout of
    its own, redis-py sends with `asyncio.wait_for`, which in Python 3.11 loses cancellations and
    starts a task for each command.

    Args:
        url: Redis URL, with or without a `key` parameter.
        key: default for a URL without one.
        retry: whether to retry commands, as redis-py does by default.
    """
    import redis.asyncio  # noqa: PLC0415
    from redis.asyncio.retry import Retry  # noqa: PLC0415
    from redis.backoff import NoBackoff  # noqa: PLC0415

    parts = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    key = query.pop("key", key)
    bare = urlunsplit(parts._replace(query=urlencode(query)))
    more: dict[str, Any] = {} if retry else {"retry": Retry(NoBackoff(), 0)}
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


@contextmanager
def redis_errors(failure: type[Exception]) -> Iterator[None]:
    """Raise `failure`, with the name of the error, instead of Redis's own or a connection's."""
    from redis.exceptions import RedisError  # noqa: PLC0415

    try:
        yield
    except (RedisError, OSError) as error:
        raise failure(type(error).__name__) from error


async def close(client: Any) -> None:
    """Close the connections of a client. A hanging Redis does not answer the TLS shutdown."""
    from redis.exceptions import RedisError  # noqa: PLC0415

    with suppress(RedisError, OSError):
        await client.aclose()
