"""Backend of `redis://`, `rediss://`, `redis+cluster://` and `rediss+cluster://`."""

from typing import TYPE_CHECKING

from ec_store.backends import Backend
from ec_store.extras import importing
from ec_store.redis.url import PERMITS, redis_options

if TYPE_CHECKING:
    from ec_store.redis.store import RedisStore


def _open(url: str, create: bool, lazy: bool) -> "RedisStore":  # noqa: ARG001 - at its first use
    with importing("redis"):
        from ec_store.redis.store import RedisStore  # noqa: PLC0415

    return RedisStore(redis_options(url))


def _writing_bytes(url: str) -> int:
    return 2 * PERMITS * redis_options(url).max_entry_bytes


BACKEND = Backend(
    check=redis_options,
    open=_open,
    # A node keeps as many idle connections (`ec_store.redis.connection.MAX_IDLE`).
    fetch_threads=16,
    writing_bytes=_writing_bytes,
)
