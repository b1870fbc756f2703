"""How many requests of each tenant may come in a minute."""

from epd.tenants import Tenant

MINUTE_S = 60.0


class Pace:
    """So many requests of each tenant in a minute: a bucket of tokens that fills steadily.

    The bucket holds a minute's worth, so that nobody is refused who keeps to the limit in every
    minute, however unevenly within it; after a rest there may be two minutes' worth in one.
    """

    def __init__(self, per_minute: float) -> None:
        self._full = max(1.0, per_minute)
        self._per_s = per_minute / MINUTE_S
        self._buckets: dict[Tenant, tuple[float, float]] = {}
        """Tokens, and when they were counted. Tenants are those of the keys file: it is bounded."""

    def take(self, tenant: Tenant, now_s: float) -> float:
        """Seconds until the tenant may come; 0 when it may now, which is then counted."""
        tokens, counted_s = self._buckets.get(tenant, (self._full, now_s))
        tokens = min(self._full, tokens + (now_s - counted_s) * self._per_s)
        admitted = tokens >= 1
        self._buckets[tenant] = (tokens - admitted, now_s)
        return 0.0 if admitted else (1 - tokens) / self._per_s
