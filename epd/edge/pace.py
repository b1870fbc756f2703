"""Rate limit: the requests of each tenant per minute."""

from epd.tenants import Tenant

MINUTE_S = 60.0


class Pace:
    """Rate limit per tenant: a token bucket that fills at a constant rate.

    The bucket holds the tokens of one minute. So a tenant within its limit in each minute is never
    rejected, even if its requests come in bursts. After a pause, a tenant may send the requests of
    two minutes in one.
    """

    def __init__(self, per_minute: float) -> None:
        self._full = max(1.0, per_minute)
        self._per_s = per_minute / MINUTE_S
        self._buckets: dict[Tenant, tuple[float, float]] = {}
        """Tokens and the time of their count, in seconds. The keys file bounds the tenants."""

    def take(self, tenant: Tenant, now_s: float) -> float:
        """Return the seconds until the tenant's next request; 0 admits this one and counts it."""
        tokens, counted_s = self._buckets.get(tenant, (self._full, now_s))
        tokens = min(self._full, tokens + (now_s - counted_s) * self._per_s)
        admitted = tokens >= 1
        self._buckets[tenant] = (tokens - admitted, now_s)
        return 0.0 if admitted else (1 - tokens) / self._per_s
