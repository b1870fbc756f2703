"""Memory counters of fetched media."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class HeldBytes(Protocol):
    """The memory counter of one request, or of one download."""

    @property
    def scope(self) -> str:
        """Name of the tenant."""

    def add(self, size: int) -> None:
        """Count additional bytes.

        Raises:
            TryLater: the memory limit is reached.
        """

    def separate_count(self) -> AbstractContextManager["HeldBytes"]:
        """Return a separate counter for the same tenant, valid until its context exits."""


class UncountedBytes:
    """A counter without a limit."""

    def __init__(self, scope: str = "") -> None:
        self.scope = scope

    def add(self, size: int) -> None:
        """Ignore the bytes: there is no limit."""

    def separate_count(self) -> AbstractContextManager[HeldBytes]:
        return nullcontext(self)
