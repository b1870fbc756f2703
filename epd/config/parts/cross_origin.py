"""Settings of what web pages of other origins may do (CORS)."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from epd.config.fields import HeaderNames, Methods, Origins


class CrossOriginSettings(BaseModel):
    """Settings of what web pages of other origins may do (CORS)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    allowed_origins: Origins = Field(
        default=(),
        description="web pages that browsers let use the proxy, by their origins: a JSON list "
        'such as ["https://chat.example.com"], or ["*"] for every page; default: none',
    )
    allowed_methods: Methods = Field(
        default=("*",), description="methods of such requests, as a JSON list; * is all"
    )
    allowed_headers: HeaderNames = Field(
        default=("*",),
        description="request headers that such pages may set, as a JSON list; * is all",
    )
    allow_credentials: bool = Field(
        default=False,
        description="let browsers send cookies and client certificates along; not with the "
        "origin *",
    )

    @model_validator(mode="after")
    def _check_origins(self) -> Self:
        if self.allow_credentials and not self.allowed_origins:
            raise ValueError("--allow-credentials needs --allowed-origins")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ValueError(
                "--allow-credentials needs origins by name: with the origin *, every web page "
                "could use the client certificates of its visitors"
            )
        return self
