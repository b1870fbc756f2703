"""Interface of name lookups."""

from collections.abc import Awaitable, Callable

LookUp = Callable[[str], Awaitable[frozenset[str]]]
"""Returns all addresses of a name; an empty set if it has none. Raises `LookUpFailed`."""


class LookUpFailed(Exception):
    """A name lookup failed."""
