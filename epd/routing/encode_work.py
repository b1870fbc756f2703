"""Encode work of one instance: what is under way there, and how fast it encodes. No I/O.

The speed is the time of each token, the mean of the instance's answers. An instance may encode
requests one after the other or several at once. Either way it has worked on a request since the end
of the one before, or since its start:

    seconds = end - max(start, end of the previous request)

So the seconds add up to the time for which the instance was busy, and a wait behind other requests
of this proxy counts for none of them. The time is divided among all clients of the instance, by the
reported load (`epd.routing.load`).
"""

from collections.abc import Callable
from dataclasses import dataclass

DECAY = 0.95
"""Weight of the earlier answers after a new one: the last 20 count."""

EXPIRES_AFTER_S = 600.0
"""Time after the last answer at which a speed expires, in seconds. The instance then gets an item
again, even if the policy would avoid it."""


@dataclass(slots=True, eq=False)
class EncodeWork:
    """Encoder tokens under way at one instance, and its speed.

    Attributes:
        tokens: predicted tokens that this proxy has sent there and that are not encoded.
        mean_tokens: mean tokens of the answered requests; 0 before the first one.
    """

    _clock: Callable[[], float]
    _ended_s: float | None = None
    _until_s: float = 0.0
    _count: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0
    mean_tokens: float = 0.0
    tokens: int = 0

    @property
    def token_s(self) -> float | None:
        """Seconds for each token; None if unknown or expired."""
        return self._seconds / self._tokens if self._clock() < self._until_s else None

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
        decay = DECAY if now_s < self._until_s else 0.0
        self._count = decay * self._count + 1.0
        self._tokens = decay * self._tokens + tokens
        self._seconds = decay * self._seconds + (now_s - max(started_s, ended_s)) * share
        self.mean_tokens = self._tokens / self._count
        self._until_s = now_s + EXPIRES_AFTER_S

    def forget_speed(self) -> None:
        self._ended_s, self._until_s, self.mean_tokens = None, 0.0, 0.0
