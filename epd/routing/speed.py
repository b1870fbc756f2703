"""Speed of an instance: the time of each request, and of each token. Pure."""

from collections.abc import Iterable
from typing import NamedTuple

Sums = tuple[float, float, float, float, float]
"""Weighted sums of ones, tokens, seconds, and their products."""

NO_SUMS: Sums = (0.0, 0.0, 0.0, 0.0, 0.0)


class Speed(NamedTuple):
    """Speed of an instance.

    Attributes:
        request_s: seconds for each request, regardless of its items.
        token_s: seconds for each encoder token.
    """

    request_s: float
    token_s: float

    def work_s(self, requests: float, tokens: float) -> float:
        return requests * self.request_s + tokens * self.token_s


ASSUMED = Speed(0.0, 1e-4)
"""Speed of an instance if none is known: 10,000 tokens per second."""


def mean_speed(speeds: Iterable[Speed | None]) -> Speed | None:
    """Return the mean of the known speeds; None if none is known."""
    known = [speed for speed in speeds if speed is not None]
    if not known:
        return None
    request_s, token_s = map(sum, zip(*known, strict=True))
    return Speed(request_s / len(known), token_s / len(known))


def fit_speed(count: float, x: float, y: float, xx: float, xy: float) -> Speed:
    """Return the speed by weighted sums: of ones, tokens, seconds, and their products.

    Where the sums allow no line with two positive parts, as with equal items, the time is in
    proportion to the tokens.
    """
    spread = count * xx - x * x
    if spread > 1e-6 * count * xx:
        token_s = (count * xy - x * y) / spread
        request_s = (y - token_s * x) / count
        if token_s > 0 and request_s > 0:
            return Speed(request_s, token_s)
    return Speed(0.0, y / x)
