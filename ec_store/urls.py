"""URLs of stores: their schemes, and the check of a URL without opening its store."""

from urllib.parse import urlsplit

from ec_store.arena.url import arena_options
from ec_store.config import redacted
from ec_store.disk.config import DiskConfig
from ec_store.redis.url import PERMITS, redis_options

DISK = ("file",)
ARENA = ("shm",)
REDIS = ("redis", "rediss", "redis+cluster", "rediss+cluster")


def check_url(url: str) -> str:
    """Check that `open_store` accepts a URL, and return it; nothing is opened.

    Raises:
        ValueError: as `open_store`.
    """
    scheme = urlsplit(url).scheme
    if scheme in DISK:
        DiskConfig.from_url(url)
    elif scheme in ARENA:
        arena_options(url)
    elif scheme in REDIS:
        redis_options(url)
    else:
        raise unknown_scheme(url)
    return url


def fetch_threads(url: str) -> int:
    """Return the default number of fetch threads for the store of a valid URL.

    Reading from memory keeps a core busy, and a second core for large entries. Waiting for a server
    keeps none busy; a node keeps as many idle connections (`ec_store.redis.connection.MAX_IDLE`).
    """
    return 4 if urlsplit(url).scheme in DISK + ARENA else 16


def writing_bytes(url: str) -> int | None:
    """Return the memory that a server needs for the entries that are being written to it.

    It comes on top of the entries. None if the store of this valid URL has no server
    that copies them.
    """
    if urlsplit(url).scheme not in REDIS:
        return None
    return 2 * PERMITS * redis_options(url).max_entry_bytes


def unknown_scheme(url: str) -> ValueError:
    """Return the error for a URL of another scheme."""
    if url.startswith("/"):
        return ValueError(f"{url!r} is not the URL of a store: is file://{url} meant?")
    return ValueError(
        f"{redacted(url)!r} is not the URL of a store: use file://, shm://, redis://, rediss://, "
        "redis+cluster:// or rediss+cluster://"
    )
