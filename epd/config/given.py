"""Value of a setting, with its source."""

from dataclasses import dataclass
from typing import Any, Literal

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
