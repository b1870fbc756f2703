"""Settings of the media in requests: their sources and limits."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from epd.config.fields import (
    Domains,
)
from epd.config.parts.named import flag_of


class MediaSettings(BaseModel):
    """Fields for the media in requests, with their validation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    allowed_local_media_path: Path | None = Field(
        default=None,
        description="folder from which file:// media are allowed, the same as on the encode "
        "instances; default: file:// media are rejected",
    )
    media_fetch: Literal["engine", "proxy"] = Field(
        default="engine",
        description="component that fetches http(s) media: each engine, or the proxy, once and "
        "keyed by content",
    )
    allowed_media_domains: Domains = Field(
        default=(),
        description="hosts from which the proxy fetches media, comma-separated; default: all hosts "
        "with a public address",
    )
    allow_http_media: bool = Field(
        default=False, description="allow the proxy to fetch media over http too, not only https"
    )
    allow_private_media: bool = Field(
        default=False,
        description="allow private addresses for the hosts of --allowed-media-domains",
    )
    trust_request_mm_kwargs: bool = Field(
        default=False,
        description="allow mm_processor_kwargs and media_io_kwargs in requests; the instances need "
        "the same flag",
    )
    media_cache_bytes: int = Field(
        default=256 * 1024**2,
        ge=0,
        description="size of each process's cache of fetched media, in bytes; 0: no cache",
    )
    max_items: int = Field(default=64, ge=1, description="maximum of media items in one request")
    max_media_bytes: int = Field(
        default=64 * 1024**2,
        ge=1,
        description="maximum size of one media item that the proxy fetches, in bytes",
    )
    max_image_pixels: int = Field(
        default=178_956_970,
        ge=1,
        description="maximum of pixels in one image; the default is vLLM's",
    )
    min_image_side: int = Field(
        default=2, ge=0, description="minimum width and height of one image, in pixels"
    )

    @model_validator(mode="after")
    def _check_media(self) -> Self:
        # A rule without effect would give the operator a false sense of protection.
        for flag in ("allowed_media_domains", "allow_http_media", "allow_private_media"):
            if getattr(self, flag) and self.media_fetch == "engine":
                raise ValueError(
                    f"{flag_of(flag)} needs --media-fetch proxy; engines have their own flags"
                )
        if self.allow_private_media and not self.allowed_media_domains:
            raise ValueError(
                "--allow-private-media needs --allowed-media-domains: without it, a request could "
                "reach every internal host"
            )
        return self
