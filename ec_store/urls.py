"""URLs of stores, without opening a store."""

from ec_store.backends import find_backend


def check_url(url: str) -> str:
    """Check the URL of a store, and return it.

    Raises:
        ValueError: the URL has another scheme, or an unknown or invalid parameter.
    """
    find_backend(url).check(url)
    return url


def fetch_threads(url: str) -> int:
    """Return the default number of fetch threads for the store of a valid URL."""
    return find_backend(url).fetch_threads


def writing_bytes(url: str) -> int | None:
    """Return the memory that a server needs for the entries that are being written to it.

    It comes on top of the entries. None if the store of this valid URL has no server that copies
    them.
    """
    return find_backend(url).writing_bytes(url)
