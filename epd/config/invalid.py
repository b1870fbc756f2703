"""What is wrong with settings, said so that it can be mended."""

from collections.abc import Iterable
from difflib import get_close_matches


class ConfigInvalid(ValueError):
    """Settings cannot be used.

    Attributes:
        reasons: all of them, a line each, with where it stands; no secret is in them.
    """

    def __init__(self, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("; ".join(self.reasons))


def unknown(name: str, known: Iterable[str]) -> str:
    """That there is no such name, and which one may be meant."""
    nearest = get_close_matches(name, known, n=1)
    return f"{name} is unknown" + (f"; is {nearest[0]} meant?" if nearest else "")
