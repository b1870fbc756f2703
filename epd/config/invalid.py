"""Errors in settings, with the place of each error and a correction; values with their sources."""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal


class ConfigInvalid(ValueError):
    """Error for invalid settings.

    Attributes:
        reasons: all errors, one line each, with the place of the setting and without secrets.
    """

    def __init__(self, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("; ".join(self.reasons))


def unknown_message(name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown name, with the nearest known name."""
    nearest = get_close_matches(name, known, n=1)
    return f"{name} is unknown" + (f"; is {nearest[0]} meant?" if nearest else "")


Source = Literal["flag", "environment", "file"]


@dataclass(frozen=True, slots=True)
class Given:
    """Value that an operator has set.

    Attributes:
        value: value as it was written.
        source: kind of the source.
        where: place in the source: `--port`, `EPD_PORT`, `epd.yaml:3`.
        label: prefix of messages about the value.
    """

    value: Any
    source: Source
    where: str
    label: str
