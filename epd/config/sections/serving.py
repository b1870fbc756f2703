"""Settings of the server, of cross-origin requests (CORS), and of tenants."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from epd.config.fields import (
    AdminKey,
    EndpointUrl,
    KeySecret,
    Origins,
    RootPath,
    Secret,
    Section,
    TenantNames,
)
from epd.tenants import ANONYMOUS, Scope, Tenant


class ServingSettings(Section):
    """Fields for the listening address, TLS, processes, logs and traces."""

    host: str = "0.0.0.0"  # noqa: S104
    """address to listen on"""
    port: int = Field(default=8000, ge=0, le=65535)
    """port to listen on"""
    uds: Path | None = None
    """path of a Unix socket to listen on instead of address and port; a stale socket file is
    replaced"""
    root_path: RootPath = None
    """path prefix that a reverse proxy puts before the routes, such as /vllm; every route is
    answered with and without it"""
    workers: int = Field(default=1, ge=1)
    """number of serving processes; each uses at most one core"""
    ssl_certfile: Path | None = None
    """file with the TLS certificate for clients, and its chain; default: no TLS"""
    ssl_keyfile: Path | None = None
    """file with the private key of the certificate, without passphrase"""
    ssl_ca_certs: Path | None = None
    """file with the CAs that verify clients' certificates"""
    ssl_cert_reqs: int = Field(default=0, ge=0, le=2)
    """clients' certificates: 0 none, 1 optional, 2 required"""
    upstream_ca_file: Path | None = None
    """file with the CAs that verify https instances; default: the system's CAs"""
    log_format: Literal["console", "json"] = "console"
    """format of log lines: console text, or JSON"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """minimum level of log lines"""
    otlp_traces_endpoint: EndpointUrl = None
    """URL of the OpenTelemetry collector for each request's spans, such as http://host:4317 (gRPC),
    or http://host:4318/v1/traces with OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf; OTEL_...
    variables set the rest; default: no traces"""

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("--ssl-certfile and --ssl-keyfile need each other")
        if (self.ssl_ca_certs is None) != (self.ssl_cert_reqs == 0):
            raise ValueError(
                "--ssl-ca-certs and --ssl-cert-reqs 1 or 2 need each other: one alone would not "
                "verify clients"
            )
        return self


class CrossOriginSettings(Section):
    """Fields for the web pages that may use the proxy (CORS), with their validation."""

    allowed_origins: Origins = ()
    """origins of web pages that may use the proxy from a browser, as a JSON list such as
    ["https://chat.example.com"], or ["*"] for all; default: none"""


class TenancySettings(Section):
    """Fields for tenants, their API keys, limits and isolation."""

    api_keys_file: Path | None = None
    """file with lines tenant:sha256, as `epd hash-key` prints them; with it, clients need a key,
    which is not forwarded to the instances"""
    isolation: Literal["tenant", "shared"] = "tenant"
    """cache entries: separate ones per tenant, or shared by all tenants; applies only with
    --api-keys-file"""
    key_secret: KeySecret = None
    """secret for store keys and cache salts, in addition to the tenant's name"""
    admin_api_key: AdminKey = None
    """key for /metrics, /settings, /ui/state, /start_profile and /stop_profile; without it, they
    answer only if --host is a loopback address, or the proxy's own user on --uds"""
    trusted_tenants: TenantNames = ()
    """tenants, comma-separated, that may set a request's priority and get the load of the decode
    instance; priorities of other tenants are dropped. Without --api-keys-file, every client may"""
    openai_api_key: Secret = None
    """API key sent to the instances if the client sends no Authorization"""
    tenant_max_requests: int | None = Field(default=None, ge=1)
    """maximum of concurrent requests of one tenant, queued ones included; further ones get 429;
    default: no limit"""
    tenant_requests_per_minute: int | None = Field(default=None, ge=1)
    """maximum of requests of one tenant per minute; further ones get 429; default: no limit"""

    def trusts_tenant(self, tenant: Tenant) -> bool:
        """Return whether a tenant's requests may have a priority and ask for an engine's load."""
        return tenant is ANONYMOUS or tenant.name in self.trusted_tenants

    def scope_of(self, tenant: Tenant) -> Scope:
        """Return the scope for the keys and salts of a tenant's cache entries."""
        alone = self.isolation == "tenant" and tenant != ANONYMOUS
        return Scope(tenant if alone else None, self._secret)

    def name_scope_of(self, tenant: Tenant) -> Scope:
        """Return the scope for the keys of a tenant's names, which no other tenant shares."""
        return Scope(tenant, self._secret)

    @property
    def _secret(self) -> bytes:
        secret = "" if self.key_secret is None else self.key_secret.get_secret_value()
        return secret.encode("utf-8", "surrogateescape")
