"""Packages of the extras of `ec-store`, which an engine's environment may lack."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing(extra: str) -> Iterator[None]:
    """Import modules that need packages of an extra.

    Raises:
        ValueError: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(
            f"the package {error.name} is not installed: pip install 'ec-store[{extra}]'"
        ) from error
