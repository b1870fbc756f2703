"""Limits of requests and bytes for the admission control of one process."""

from dataclasses import dataclass

from epd.config import ProxyConfig
from epd.media.held import max_body_bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one process.

    Attributes:
        requests: concurrent requests.
        queue: requests that wait for a place.
        queue_timeout_s: longest wait for a place, in seconds.
        body_bytes: bytes of all bodies in memory.
        tenant_requests: concurrent requests of one tenant, queued ones included; None: no limit.
        tenant_per_minute: requests of one tenant per minute; None: no limit.
        tenant_body_bytes: bytes of one tenant's bodies in memory; None: no limit.
    """

    requests: int
    queue: int
    queue_timeout_s: float
    body_bytes: int
    tenant_requests: int | None = None
    tenant_per_minute: float | None = None
    tenant_body_bytes: int | None = None


def limits_of(config: ProxyConfig) -> Limits:
    """Return one worker's share of the configured limits.

    The workers together keep the configured limits, for any distribution of the requests.
    """
    share, most, pace = (
        config.workers,
        config.tenant_max_requests,
        config.tenant_requests_per_minute,
    )
    body_bytes = max(1, config.max_inflight_bytes // share)
    # A tenant gets half: bodies that it announces and never sends cannot lock out the other
    # tenants. One body of the largest size always fits.
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
