"""Clock by which the entries of a shared directory expire."""

import time

JUMP_S = 60.0
"""Seconds by which the clock may jump ahead without being doubted."""

JUMP_LASTS_S = 3600.0
"""Seconds after which a doubted clock is believed."""


class StoreClock:
    """Clock by which entries expire.

    One wrong time must not expire a whole store, such as that of a machine which resumes before it
    synchronizes its clock. So entries age by the earlier one of two clocks: the present one, and
    one that follows a jump ahead of more than `JUMP_S` only after `JUMP_LASTS_S`.
    """

    def __init__(self) -> None:
        self._trusted_ahead_s = time.time() - time.monotonic()
        self._doubted_s: float | None = None

    def expiry_now(self) -> float:
        """Return seconds since the epoch, but no time that is in doubt."""
        asked_s = time.monotonic()
        ahead_s = time.time() - asked_s
        if ahead_s <= self._trusted_ahead_s + JUMP_S:
            self._doubted_s = None
        elif self._doubted_s is None:
            self._doubted_s = asked_s
        if self._doubted_s is None or asked_s - self._doubted_s >= JUMP_LASTS_S:
            self._trusted_ahead_s = ahead_s
        return asked_s + min(ahead_s, self._trusted_ahead_s)
