"""Settings of limits, deadlines and the health of instances, and of the media in requests."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from epd.config.fields import Domains, Seconds, SecondsOrNone, Section
from epd.routing.health import HealthPolicy


class LimitSettings(Section):
    """Fields for limits, deadlines and the health of instances."""

    max_requests: int = Field(default=1024, ge=1)
    """maximum of concurrent requests, over all workers; further ones are queued"""
    max_queue: int = Field(default=256, ge=0)
    """maximum of queued requests, over all workers; further ones get 429"""
    max_inflight_bytes: int = Field(default=1024**3, ge=1024)
    """maximum of bytes of request bodies in memory, over all workers; further bodies get 503"""
    max_body_bytes: int = Field(default=128 * 1024**2, ge=1024)
    """maximum size of a request body, in bytes; a larger one gets 413"""
    max_text_bytes: int = Field(default=16 * 1024**2, ge=1024)
    """maximum size of a JSON request body without its media (data: URLs in base64, input_audio), in
    bytes; parsing it blocks the process"""
    max_connections: int = Field(default=0, ge=0)
    """maximum of client connections to one process; 0: as many as its file descriptors allow"""
    header_timeout_s: Seconds = 10.0
    """maximum time for a request's head to arrive, in seconds"""
    keep_alive_s: Seconds = 75.0
    """seconds until a client connection without a request is closed"""
    write_timeout_s: Seconds = 60.0
    """seconds until the connection of a client that does not read is closed"""
    queue_timeout_s: Seconds = 10.0
    """maximum time of a request in the queue, in seconds; then it gets 503"""
    body_timeout_s: Seconds = 60.0
    """maximum time for a request's body to arrive, in seconds; then it gets 408"""
    media_timeout_s: Seconds = 30.0
    """maximum time for the proxy to fetch one media item, in seconds, and before it to wait for one
    of the 64 downloads of a process; then the request gets 503"""
    encode_timeout_s: Seconds = 60.0
    """maximum time of a request's encode stage, over all its items and their tries, in seconds; a
    try has half of what is left while another instance may follow, so set it to at least twice the
    time of the longest video. With --on-encode-failure local, prefill or decode encode an item that
    is predicted to need longer"""
    prefill_timeout_s: Seconds = 120.0
    """maximum time of the prefill stage, in seconds"""
    kv_lease_s: Seconds = 30.0
    """seconds for which prefill keeps its KV blocks for decode (set it to vLLM's
    kv_lease_duration); a request that uses half of them is logged as a warning"""
    first_byte_timeout_s: Seconds = 300.0
    """maximum time from a streaming decode request to the first byte of its response, in seconds;
    only request_timeout_s limits responses that are not streams"""
    idle_timeout_s: Seconds = 600.0
    """maximum time between two chunks of a decode response, in seconds; vLLM sends nothing while
    reasoning is hidden, unless it runs with --sse-keep-alive-interval"""
    request_timeout_s: Seconds = 1800.0
    """maximum time of a request from its head to its end, in seconds; a client's x-request-timeout,
    in seconds, can only shorten it"""
    health_timeout_s: Seconds = 5.0
    """maximum time for an instance's response to /health and /v1/models, in seconds"""
    probe_interval_s: Seconds = 5.0
    """seconds between two probes (GET /health) of an instance that is up; one that is down is
    probed after 1 s, then after twice as long each time, up to six intervals. Each delay varies by
    up to a tenth, to spread the probes of several instances"""
    eject_after: int = Field(default=5, ge=1)
    """failures in a row after which an instance is ejected"""
    eject_s: Seconds = 30.0
    """seconds of an ejection, times the number of the instance's recent ejections, at most ten"""
    suspect_s: SecondsOrNone = 300.0
    """seconds for which a request, or one with the same media, is rejected after two instances died
    while they served it (503 suspected_fatal), and within which three deaths put a tenant's
    requests in quarantine; 0: neither"""
    drain_delay_s: SecondsOrNone = 5.0
    """seconds from SIGTERM, when /ready turns to 503, until the proxy accepts no more
    connections"""
    drain_timeout_s: SecondsOrNone = 300.0
    """seconds after --drain-delay-s until requests that still run are cancelled"""

    @property
    def health(self) -> HealthPolicy:
        return HealthPolicy(*(getattr(self, name) for name in HealthPolicy._fields))


class MediaSettings(Section):
    """Fields for the media in requests, with their validation."""

    allowed_local_media_path: Path | None = None
    """folder from which file:// media are allowed, the same as on the encode instances; default:
    file:// media are rejected"""
    media_fetch: Literal["engine", "proxy"] = "engine"
    """component that fetches http(s) media: each engine, or the proxy, once and keyed by content"""
    allowed_media_domains: Domains = ()
    """hosts from which the proxy fetches media, comma-separated; default: all hosts with a public
    address"""
    allow_http_media: bool = False
    """allow the proxy to fetch media over http too, not only https"""
    allow_private_media: bool = False
    """allow private addresses for the hosts of --allowed-media-domains"""
    media_fetch_trust_env: bool = False
    """let the proxy fetch media through HTTP_PROXY and HTTPS_PROXY, except from hosts in NO_PROXY;
    the forward proxy then resolves the names, so --allowed-media-domains is required"""
    trust_request_mm_kwargs: bool = False
    """allow mm_processor_kwargs and media_io_kwargs in requests; the instances need the same
    flag"""
    media_cache_bytes: int = Field(default=256 * 1024**2, ge=0)
    """size of each process's cache of fetched media, in bytes; 0: no cache"""
    max_items: int = Field(default=64, ge=1)
    """maximum of media items in one request"""
    max_media_bytes: int = Field(default=64 * 1024**2, ge=1)
    """maximum size of one media item that the proxy fetches, in bytes"""
    max_image_pixels: int = Field(default=178_956_970, ge=1)
    """maximum of pixels in one image; the default is vLLM's"""

    @property
    def fetches_media(self) -> bool:
        """Whether the proxy fetches http(s) media, and not each engine."""
        return self.media_fetch == "proxy"
