"""What fetched media are counted with while they are in memory."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from epd.config import ProxyConfig


class Held(Protocol):
    """What the bytes in memory of one request, or of one download, are counted with."""

    @property
    def scope(self) -> str:
        """Name of the tenant."""

    def add(self, size: int) -> None:
        """Count more bytes.

        Raises:
            TryLater: they are too many.
        """

    def beside(self) -> AbstractContextManager["Held"]:
        """Return what other bytes of the same tenant are counted with until it is left."""


class Uncounted:
    """Counts nothing."""

    def __init__(self, scope: str = "") -> None:
        """Be of this tenant."""
        self.scope = scope

    def add(self, size: int) -> None:
        """Count nothing."""

    def beside(self) -> AbstractContextManager[Held]:
        """Return the same."""
        return nullcontext(self)


def max_body_bytes(config: ProxyConfig) -> int:
    """The largest body that one process takes, and most of what is fetched for one request."""
    return min(config.max_body_bytes, max(1, config.max_inflight_bytes // config.workers))
