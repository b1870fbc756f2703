"""How many requests and bytes one process lets in."""

from dataclasses import dataclass

from epd.config import ProxyConfig
from epd.media.held import max_body_bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """What one process lets in.

    Attributes:
        requests: so many at once.
        queue: so many wait for a place.
        queue_timeout_s: so long.
        body_bytes: so many bytes of bodies at once.
        tenant_requests: so many of a tenant at once, those that wait included.
        tenant_per_minute: so many of a tenant in a minute.
        tenant_body_bytes: so many bytes of a tenant's bodies at once.
    """

    requests: int
    queue: int
    queue_timeout_s: float
    body_bytes: int
    tenant_requests: int | None = None
    tenant_per_minute: float | None = None
    tenant_body_bytes: int | None = None


def limits_of(config: ProxyConfig) -> Limits:
    """Each worker's share: together they keep to what is configured, whoever gets which request."""
    share, most, pace = (
        config.workers,
        config.tenant_max_requests,
        config.tenant_requests_per_minute,
    )
    body_bytes = max(1, config.max_inflight_bytes // share)
    # Half, or what is announced and never sent could shut all others out; but one body always fits.
    tenants = max(body_bytes // 2, max_body_bytes(config))
    return Limits(
        requests=max(1, config.max_requests // share),
        queue=config.max_queue // share,
        queue_timeout_s=config.queue_timeout_s,
        body_bytes=body_bytes,
        tenant_requests=None if most is None else max(1, most // share),
        tenant_per_minute=None if pace is None else pace / share,
        tenant_body_bytes=None if config.api_keys_file is None else tenants,
    )
