"""Settings of cross-origin requests (CORS): the web pages that may use the proxy."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from epd.config.fields import HeaderNames, Methods, Origins


class CrossOriginSettings(BaseModel):
    """Fields for cross-origin requests (CORS), with their validation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    allowed_origins: Origins = Field(
        default=(),
        description="origins of web pages that may use the proxy from a browser, as a JSON list "
        'such as ["https://chat.example.com"], or ["*"] for all; default: none',
    )
    allowed_methods: Methods = Field(
        default=("*",),
        description="HTTP methods that these web pages may use, as a JSON list; * allows all",
    )
    allowed_headers: HeaderNames = Field(
        default=("*",),
        description="request headers that these web pages may set, as a JSON list; * allows all",
    )
    allow_credentials: bool = Field(
        default=False,
        description="allow requests of these web pages to carry cookies and client certificates; "
        "invalid with the origin *",
    )

    @model_validator(mode="after")
    def _check_origins(self) -> Self:
        if self.allow_credentials and not self.allowed_origins:
            raise ValueError("--allow-credentials needs --allowed-origins")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ValueError(
                "--allow-credentials needs explicit origins: with the origin *, every web page "
                "could use the client certificates of its visitors"
            )
        return self
