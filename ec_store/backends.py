"""Backends of the store, by the scheme of a URL.

A distribution registers a backend in the group `ec_store.backends` of its entry points:

    [project.entry-points."ec_store.backends"]
    mine = "my_package.backend:BACKEND"

Then `mine://…` is a URL of a store, and of a tier if the store is one. The contracts of
`ec_store.testing` test a backend.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any
from urllib.parse import urlsplit

from ec_store.config import redacted

GROUP = "ec_store.backends"
FETCH_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Functions of the stores of one scheme. Each raises ValueError if a URL is invalid.

    They import what a store needs at their first call: a process that only checks URLs needs no
    client.

    Attributes:
        check: checks a URL without opening a store; the result is not used.
        open: opens a store. Its arguments are the URL and `create` and `lazy` of `open_store`. It
            returns a `Store`, a `Tier` behind the memory of a host, or an object that is both.
        fetch_threads: default number of threads that fetch entries. Reading from memory keeps a
            core busy, waiting for a server none.
        writing_bytes: returns the memory that a server needs for the entries that are being
            written to it, on top of the entries; None without a server that copies them.
    """

    check: Callable[[str], object]
    open: Callable[[str, bool, bool], Any]
    fetch_threads: int = FETCH_THREADS
    writing_bytes: Callable[[str], int | None] = lambda _: None


def find_backend(url: str) -> Backend:
    """Return the backend of a URL's scheme.

    Raises:
        ValueError: no installed distribution registers the scheme.
    """
    backend = _backend(urlsplit(url).scheme)
    if backend is not None:
        return backend
    if url.startswith("/"):
        raise ValueError(f"{url!r} is not the URL of a store: is file://{url} meant?")
    schemes = ", ".join(f"{name}://" for name in sorted(entry_points(group=GROUP).names))
    raise ValueError(f"{redacted(url)!r} is not the URL of a store: use one of {schemes}")


@lru_cache(maxsize=64)
def _backend(scheme: str) -> Backend | None:
    """Return the backend of a scheme. Cached: the entry points are read from files."""
    found = list(entry_points(group=GROUP, name=scheme)) if scheme else []
    if len({point.value for point in found}) > 1:
        values = ", ".join(point.value for point in found)
        raise ValueError(f"several distributions register {scheme}://: {values}")
    backend = found[0].load() if found else None
    if backend is not None and not isinstance(backend, Backend):
        raise ValueError(f"{found[0].value} is not an ec_store.backends.Backend")
    return backend
