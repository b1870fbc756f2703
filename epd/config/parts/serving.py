"""Settings of the listening address, TLS, processes, logs and traces."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from epd.config.fields import (
    EndpointUrl,
    RootPath,
)


class ServingSettings(BaseModel):
    """Fields for the listening address, TLS, processes, logs and traces."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(default="0.0.0.0", description="address to listen on")  # noqa: S104
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on")
    uds: Path | None = Field(
        default=None,
        description="path of a Unix socket to listen on instead of address and port; a stale "
        "socket file is replaced",
    )
    root_path: RootPath = Field(
        default=None,
        description="path prefix that a reverse proxy puts before the routes, such as /vllm; every "
        "route is answered with and without it",
    )
    workers: int = Field(
        default=1, ge=1, description="number of serving processes; each uses at most one core"
    )
    ssl_certfile: Path | None = Field(
        default=None,
        description="file with the TLS certificate for clients, and its chain; default: no TLS",
    )
    ssl_keyfile: Path | None = Field(
        default=None,
        description="file with the private key of the certificate, without passphrase",
    )
    ssl_ca_certs: Path | None = Field(
        default=None, description="file with the CAs that verify clients' certificates"
    )
    ssl_cert_reqs: int = Field(
        default=0,
        ge=0,
        le=2,
        description="clients' certificates: 0 none, 1 optional, 2 required",
    )
    upstream_ca_file: Path | None = Field(
        default=None,
        description="file with the CAs that verify https instances; default: the system's CAs",
    )
    log_format: Literal["console", "json"] = Field(
        default="console", description="format of log lines: console text, or JSON"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="minimum level of log lines"
    )
    log_tenants: bool = Field(
        default=False,
        description="add the tenant's name, as in --api-keys-file, to the log line of a request",
    )
    otlp_traces_endpoint: EndpointUrl = Field(
        default=None,
        description="URL of the OpenTelemetry collector for each request's spans, such as "
        "http://host:4317 (gRPC), or http://host:4318/v1/traces with "
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf; OTEL_... variables set the rest; "
        "default: no traces",
    )

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("--ssl-certfile and --ssl-keyfile need each other")
        if (self.ssl_ca_certs is None) != (self.ssl_cert_reqs == 0):
            raise ValueError(
                "--ssl-ca-certs and --ssl-cert-reqs 1 or 2 need each other: one alone would not "
                "verify clients"
            )
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ValueError("--ssl-ca-certs needs --ssl-certfile")
        return self
