"""Errors in settings, with the place of each error and a correction."""

from collections.abc import Iterable
from difflib import get_close_matches


class ConfigInvalid(ValueError):
    """Error for invalid settings.

    Attributes:
        reasons: all errors, one line each, with the place of the setting and without secrets.
    """

    def __init__(self, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("; ".join(self.reasons))


def unknown(name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown name, with the nearest known name."""
    nearest = get_close_matches(name, known, n=1)
    return f"{name} is unknown" + (f"; is {nearest[0]} meant?" if nearest else "")
