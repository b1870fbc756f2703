"""URLs of stores, without opening a store."""

from urllib.parse import urlsplit

from ec_store.arena.remote_url import SCHEMES as REMOTE
from ec_store.arena.remote_url import remote_options
from ec_store.backends import find_backend


def check_url(url: str) -> str:
    """Check the URL of a store, and return it.

    Raises:
        ValueError: the URL has another scheme, or an unknown or invalid parameter.
    """
    if (scheme := urlsplit(url).scheme) in REMOTE:
        raise ValueError(f"{scheme}:// is for a proxy: on its own host, use shm:///path/of/socket")
    find_backend(url).check(url)
    return url


def check_proxy_url(url: str) -> str:
    """Check that `open_proxy_store` accepts a URL, and return it; errors are those of `check_url`.

    A proxy may also use the memory of another host.
    """
    if urlsplit(url).scheme in REMOTE:
        remote_options(url)
        return url
    return check_url(url)
