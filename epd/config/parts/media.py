"""Settings of the media in requests."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from epd.config.fields import (
    Domains,
)
from epd.config.parts.named import flag_of


class MediaSettings(BaseModel):
    """Settings of the media in requests."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    allowed_local_media_path: Path | None = Field(
        default=None,
        description="folder that file:// media may come from, the same as the encode instances'; "
        "without it they are refused",
    )
    media_fetch: Literal["engine", "proxy"] = Field(
        default="engine",
        description="who fetches http(s) media: each engine, or the proxy, once and keyed by "
        "content",
    )
    allowed_media_domains: Domains = Field(
        default=(),
        description="hosts that the proxy fetches media from, comma-separated; without it any "
        "with a public address",
    )
    allow_http_media: bool = Field(
        default=False, description="let the proxy fetch over http too, not https alone"
    )
    allow_private_media: bool = Field(
        default=False,
        description="let the hosts of --allowed-media-domains have private addresses",
    )
    trust_request_mm_kwargs: bool = Field(
        default=False,
        description="let requests have mm_processor_kwargs and media_io_kwargs; the instances "
        "need the same flag",
    )
    media_cache_bytes: int = Field(
        default=256 * 1024**2, ge=0, description="memory for media that the proxy has fetched"
    )
    max_items: int = Field(default=64, ge=1, description="media items in one request")
    max_media_bytes: int = Field(
        default=64 * 1024**2, ge=1, description="size of one item that the proxy fetches"
    )
    max_image_pixels: int = Field(
        default=178_956_970, ge=1, description="pixels of one picture; the default is vLLM's"
    )
    min_image_side: int = Field(
        default=2, ge=0, description="width and height of one picture, in pixels"
    )

    @model_validator(mode="after")
    def _check_media(self) -> Self:
        # A policy that is set and does nothing would be taken for one that protects.
        for flag in ("allowed_media_domains", "allow_http_media", "allow_private_media"):
            if getattr(self, flag) and self.media_fetch == "engine":
                raise ValueError(
                    f"{flag_of(flag)} needs --media-fetch proxy; engines have flags of their own"
                )
        if self.allow_private_media and not self.allowed_media_domains:
            raise ValueError(
                "--allow-private-media needs --allowed-media-domains: without it a request could "
                "reach every host inside"
            )
        return self
