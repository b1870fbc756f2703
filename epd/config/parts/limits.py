"""Settings of how much is served at once, and how long anything may take."""

from pydantic import BaseModel, ConfigDict, Field

from epd.config.fields import (
    Seconds,
    SecondsOrNone,
)
from epd.routing.health import HealthPolicy


class LimitSettings(BaseModel):
    """Settings of how much is served at once, and how long anything may take."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_requests: int = Field(
        default=1024,
        ge=1,
        description="requests served at once, all workers together; more wait in a queue",
    )
    max_queue: int = Field(
        default=256, ge=0, description="requests that wait for their turn; 429 above"
    )
    max_inflight_bytes: int = Field(
        default=1024**3,
        ge=1024,
        description="request bodies in memory at once, all workers together; 503 above",
    )
    max_body_bytes: int = Field(
        default=128 * 1024**2, ge=1024, description="size of a request body"
    )
    max_text_bytes: int = Field(
        default=16 * 1024**2,
        ge=1024,
        description="a JSON request body without its media (data: URLs in base64, input_audio); "
        "nothing else runs while it is parsed",
    )
    max_connections: int = Field(
        default=0,
        ge=0,
        description="clients' connections to one process; 0: what its file descriptors allow",
    )
    stream_interval: int = Field(
        default=1,
        ge=1,
        description="tokens in each chunk of a stream, after the first token, unless the request "
        "has a stream_interval; vLLM takes it for chat and text completions, and its own "
        "--stream-interval (1) is the least",
    )
    body_min_rate_bytes: int = Field(
        default=64 * 1024, ge=1, description="of a request body, each second, after the first 5"
    )
    header_timeout_s: Seconds = Field(default=10.0, description="a request head's arrival")
    keep_alive_s: Seconds = Field(
        default=75.0, description="a client's connection that waits for another request"
    )
    write_timeout_s: Seconds = Field(
        default=60.0, description="a client that does not read its answer"
    )
    queue_timeout_s: Seconds = Field(
        default=10.0, description="a request's wait for its turn; 503 after it"
    )
    body_timeout_s: Seconds = Field(default=60.0, description="a request body's arrival")
    connect_timeout_s: Seconds = Field(default=2.0, description="connecting to an instance")
    media_timeout_s: Seconds = Field(default=30.0, description="fetching one item")
    encode_timeout_s: Seconds = Field(default=30.0, description="encoding one item")
    prefill_timeout_s: Seconds = Field(default=120.0, description="the prefill stage")
    kv_lease_s: Seconds = Field(
        default=30.0,
        description="how long prefill keeps its blocks for decode (vLLM's kv_lease_duration); a "
        "request that takes half of it is logged as a warning",
    )
    first_byte_timeout_s: Seconds = Field(
        default=300.0,
        description="from a streaming decode request to the first byte of its answer; an answer "
        "without a stream is limited by request_timeout_s alone",
    )
    idle_timeout_s: Seconds = Field(
        default=600.0,
        description="silence between two chunks of a decode answer; vLLM sends nothing while "
        "reasoning is hidden, unless it runs with --sse-keep-alive-interval",
    )
    request_timeout_s: Seconds = Field(
        default=1800.0,
        description="a request from its body to its end; a client's x-request-timeout, in seconds, "
        "can only shorten it",
    )
    health_timeout_s: Seconds = Field(
        default=5.0, description="an instance's answer to /health and /v1/models"
    )
    probe_interval_s: Seconds = Field(
        default=5.0,
        description="between two probes (GET /health) of an instance that is up; all delays "
        "between probes vary by up to a tenth, so that probes of several instances spread",
    )
    probe_backoff_s: Seconds = Field(
        default=1.0,
        description="until an instance that is down is probed again; doubled each time",
    )
    probe_backoff_max_s: Seconds = Field(default=30.0, description="the longest such wait")
    eject_after: int = Field(
        default=5, ge=1, description="failures in a row after which an instance is left alone"
    )
    eject_s: Seconds = Field(
        default=30.0, description="for how long, times how often it had to be of late"
    )
    eject_max_s: Seconds = Field(default=300.0, description="the longest such time")
    suspect_s: SecondsOrNone = Field(
        default=300.0,
        description="how long a request, or one with the same media, is rejected after two "
        "instances died while they served it (503 suspected_fatal); 0: not at all",
    )
    drain_delay_s: SecondsOrNone = Field(
        default=5.0, description="from SIGTERM, and /ready's 503, until no connection is taken"
    )
    drain_timeout_s: SecondsOrNone = Field(
        default=300.0, description="from then until the requests that still run are ended"
    )
    profile_timeout_s: Seconds = Field(
        default=300.0, description="an instance's answer to /start_profile and /stop_profile"
    )

    @property
    def health(self) -> HealthPolicy:
        """When an instance is left alone, and when it is looked at again."""
        return HealthPolicy(
            eject_after=self.eject_after,
            eject_s=self.eject_s,
            max_eject_s=self.eject_max_s,
            probe_interval_s=self.probe_interval_s,
            min_backoff_s=self.probe_backoff_s,
            max_backoff_s=self.probe_backoff_max_s,
        )
