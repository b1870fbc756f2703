"""Interface of the counter of a request's memory."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class HeldBytes(Protocol):
    """The memory counter of one request, or of one download."""

    @property
    def scope(self) -> str:
        """Name of the tenant."""

    def add(self, size: int) -> None:
        """Count additional bytes. Raise `TryLater` if the memory limit is reached."""

    def try_add(self, size: int) -> bool:
        """Count additional bytes if there is room for them. Return whether there is."""

    def remove(self, size: int) -> None:
        """Stop counting some bytes."""

    def may_give_up(self, size: int, give_up: Callable[[], None]) -> None:
        """Offer counted bytes to requests that find no room; `give_up` then frees them."""

    def withdraw_offer(self) -> None:
        """End the offer of `may_give_up`, if there is one."""

    def separate_count(self) -> AbstractContextManager["HeldBytes"]:
        """Return a separate counter for the same tenant, valid until its context exits."""


class UncountedBytes:
    """A counter without a limit."""

    def __init__(self, scope: str = "") -> None:
        self.scope = scope

    def add(self, size: int) -> None:
        """Ignore the bytes: there is no limit."""

    def try_add(self, size: int) -> bool:  # noqa: ARG002 - of the protocol
        """Return True: there is no limit."""
        return True

    def remove(self, size: int) -> None:
        """Ignore the bytes: they are not counted."""

    def may_give_up(self, size: int, give_up: Callable[[], None]) -> None:
        """Ignore the offer: nothing lacks room."""

    def withdraw_offer(self) -> None:
        """Do nothing: there is no offer."""

    def separate_count(self) -> AbstractContextManager[HeldBytes]:
        return nullcontext(self)
