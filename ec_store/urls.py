"""URLs of stores: their options by scheme, without opening a store."""

from urllib.parse import urlsplit

from ec_store.arena.remote_url import SCHEMES as REMOTE
from ec_store.arena.remote_url import remote_options
from ec_store.arena.url import ArenaOptions, arena_options
from ec_store.config import redacted
from ec_store.disk.config import DiskConfig
from ec_store.redis.url import PERMITS, RedisOptions, redis_options

REDIS = ("redis", "rediss", "redis+cluster", "rediss+cluster")


def parse_url(url: str) -> DiskConfig | ArenaOptions | RedisOptions:
    """Return the options in the URL of a store.

    Raises:
        ValueError: the URL has another scheme, or an unknown or invalid parameter.
    """
    scheme = urlsplit(url).scheme
    if scheme == "file":
        return DiskConfig.from_url(url)
    if scheme == "shm":
        return arena_options(url)
    if scheme in REDIS:
        return redis_options(url)
    if scheme in REMOTE:
        raise ValueError(f"{scheme}:// is for a proxy: on its own host, use shm:///path/of/socket")
    if url.startswith("/"):
        raise ValueError(f"{url!r} is not the URL of a store: is file://{url} meant?")
    raise ValueError(
        f"{redacted(url)!r} is not the URL of a store: use file://, shm://, redis://, rediss://, "
        "redis+cluster:// or rediss+cluster://"
    )


def check_url(url: str) -> str:
    """Check that `open_store` accepts a URL, and return it; errors are those of `parse_url`."""
    parse_url(url)
    return url


def check_proxy_url(url: str) -> str:
    """Check that `open_proxy_store` accepts a URL, and return it; errors are those of `parse_url`.

    A proxy may also use the memory of another host.
    """
    if urlsplit(url).scheme in REMOTE:
        remote_options(url)
        return url
    return check_url(url)


def fetch_threads(url: str) -> int:
    """Return the default number of fetch threads for the store of a valid URL.

    Reading from memory keeps a core busy, and a second core for large entries. Waiting for a server
    keeps none busy; a node keeps as many idle connections (`ec_store.redis.connection.MAX_IDLE`).
    """
    return 16 if isinstance(parse_url(url), RedisOptions) else 4


def writing_bytes(url: str) -> int | None:
    """Return the memory that a server needs for the entries that are being written to it.

    It comes on top of the entries. None if the store of this valid URL has no server
    that copies them.
    """
    options = parse_url(url)
    return 2 * PERMITS * options.max_entry_bytes if isinstance(options, RedisOptions) else None
