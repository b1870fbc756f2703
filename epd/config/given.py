"""One value, and who has set it."""

from dataclasses import dataclass
from typing import Any, Literal

Source = Literal["flag", "environment", "file"]


@dataclass(frozen=True, slots=True)
class Given:
    """A value that was set.

    Attributes:
        value: as it was written.
        source: by what.
        where: what to look for there: `--port`, `EPD_PORT`, `epd.yaml:3`.
        label: how a message about it begins.
    """

    value: Any
    source: Source
    where: str
    label: str
