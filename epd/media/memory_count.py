"""Interface of the counter of a request's memory."""

from contextlib import AbstractContextManager, nullcontext


class MemoryCount:
    """The memory counter of one request, or of one download: this one has no limit."""

    __slots__ = ()

    @property
    def scope(self) -> str:
        """Name of the tenant."""
        return ""

    def add(self, size: int) -> None:
        """Count additional bytes. Raise `TryLater` if the memory limit is reached."""

    def try_add(self, size: int) -> bool:  # noqa: ARG002 - there is always room
        """Count additional bytes if there is room for them. Return whether there is."""
        return True

    def remove(self, size: int) -> None:
        """Stop counting some bytes."""

    def separate_count(self) -> AbstractContextManager["MemoryCount"]:
        """Return a separate counter for the same tenant, valid until its context exits."""
        return nullcontext(self)
