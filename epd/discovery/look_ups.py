"""What asks for the addresses of a name."""

from collections.abc import Awaitable, Callable

LookUp = Callable[[str], Awaitable[frozenset[str]]]
"""All addresses of a name; none where it has none. Raises `LookUpFailed`."""


class LookUpFailed(Exception):
    """Nobody can tell what a name leads to."""
