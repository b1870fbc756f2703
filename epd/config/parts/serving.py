"""Settings of the address that clients speak to, of processes and of what is said of them."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from epd.config.fields import (
    EndpointUrl,
    RootPath,
)


class ServingSettings(BaseModel):
    """Settings of the address that clients speak to, of processes and of what is said of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(default="0.0.0.0", description="address to listen on")  # noqa: S104
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on")
    uds: Path | None = Field(
        default=None,
        description="Unix socket to listen on in place of address and port; a file that nothing "
        "listens on is replaced",
    )
    root_path: RootPath = Field(
        default=None,
        description="path under which a reverse proxy has this one, such as /vllm; every route is "
        "answered with it and without it",
    )
    workers: int = Field(
        default=1, ge=1, description="processes that serve it; one uses one core at most"
    )
    ssl_certfile: Path | None = Field(
        default=None,
        description="certificate, and its chain, that clients are served over TLS with",
    )
    ssl_keyfile: Path | None = Field(
        default=None, description="its private key, without passphrase"
    )
    ssl_ca_certs: Path | None = Field(
        default=None, description="CAs that clients' own certificates must be from"
    )
    ssl_cert_reqs: int = Field(
        default=0,
        ge=0,
        le=2,
        description="clients' own certificates: 0 none, 1 optional, 2 required",
    )
    upstream_ca_file: Path | None = Field(
        default=None,
        description="CAs that the certificates of https instances must be from; without it the "
        "system's",
    )
    log_format: Literal["console", "json"] = Field(
        default="console", description="log lines for people or for machines"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least level that is logged"
    )
    log_tenants: bool = Field(
        default=False,
        description="name the tenant, as in --api-keys-file, in the log line of a request",
    )
    otlp_traces_endpoint: EndpointUrl = Field(
        default=None,
        description="OpenTelemetry collector that each request's spans are exported to, such as "
        "http://host:4317 (gRPC), or http://host:4318/v1/traces with "
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf; OTEL_... variables say the rest",
    )

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("--ssl-certfile and --ssl-keyfile need each other")
        if (self.ssl_ca_certs is None) != (self.ssl_cert_reqs == 0):
            raise ValueError(
                "--ssl-ca-certs needs --ssl-cert-reqs 1 or 2, and they need it: one without the "
                "other would verify nobody"
            )
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ValueError("--ssl-ca-certs needs --ssl-certfile")
        return self
