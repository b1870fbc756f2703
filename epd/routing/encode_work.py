"""Encode work of one instance: what is under way there, and how fast it encodes. No I/O.

The speed has two parts: time of each request, and time of each token. They are learned by least
squares from the instance's answers. An instance may encode requests one after the other or several
at once. Either way it has worked on a request since the end of the one before, or since its start:

    seconds = end - max(start, end of the previous request)

So the seconds add up to the time for which the instance was busy, and a wait behind other requests
of this proxy counts for none of them. The time is divided among all clients of the instance, by the
reported load (`epd.routing.load`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

DECAY = 0.95
"""Weight of the earlier answers after a new one: the last 20 count."""

EXPIRES_AFTER_S = 600.0
"""Time after the last answer at which a speed expires, in seconds. The instance then gets an item
again, even if the policy would avoid it."""

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


@dataclass(slots=True, eq=False)
class EncodeWork:
    """Encoder tokens under way at one instance, and its speed.

    Attributes:
        tokens: predicted tokens that this proxy has sent there and that are not encoded.
        mean_tokens: mean tokens of the answered requests; 0 before the first one.
    """

    _clock: Callable[[], float]
    _ended_s: float | None = None
    _sums: Sums = NO_SUMS
    _speed: Speed | None = None
    _until_s: float = 0.0
    mean_tokens: float = 0.0
    tokens: int = 0

    @property
    def speed(self) -> Speed | None:
        """The speed; None if unknown or expired."""
        if self._clock() >= self._until_s:
            return None
        if self._speed is None:  # not since the last answer: few policies need the speed
            self._speed = _fit(*self._sums)
        return self._speed

    def learn_answer(self, tokens: int, started_s: float, share: float) -> None:
        """Learn from an answer.

        The first one after a start is ignored: the instance compiles code and opens connections.

        Args:
            tokens: tokens of the request, at least 1.
            started_s: start of the request.
            share: this proxy's part of the requests at the instance, above 0 and at most 1.
        """
        now_s, ended_s = self._clock(), self._ended_s
        self._ended_s = now_s
        if ended_s is None:
            return
        if now_s >= self._until_s:
            self._sums = NO_SUMS
        seconds = (now_s - max(started_s, ended_s)) * share
        count, x, y, xx, xy = self._sums
        count, x, y = DECAY * count + 1.0, DECAY * x + tokens, DECAY * y + seconds
        self._sums = count, x, y, DECAY * xx + tokens * tokens, DECAY * xy + tokens * seconds
        self._speed, self.mean_tokens = None, x / count
        self._until_s = now_s + EXPIRES_AFTER_S

    def forget_speed(self) -> None:
        self._ended_s = self._speed = None
        self._sums, self._until_s, self.mean_tokens = NO_SUMS, 0.0, 0.0


def _fit(count: float, x: float, y: float, xx: float, xy: float) -> Speed:
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
