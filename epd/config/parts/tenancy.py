"""Settings of tenants: their API keys, limits and isolation."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from epd.config.fields import (
    AdminKey,
    KeySecret,
    Secret,
    TenantNames,
)
from epd.config.parts.named import flag_of
from epd.tenants import ANONYMOUS, Scope, Tenant


class TenancySettings(BaseModel):
    """Fields for tenants, their API keys, limits and isolation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    api_keys_file: Path | None = Field(
        default=None,
        description="file with lines tenant:sha256, as `epd hash-key` prints them; with it, "
        "clients need a key, which is not forwarded to the instances",
    )
    isolation: Literal["tenant", "shared"] = Field(
        default="tenant",
        description="cache entries: separate ones per tenant, or shared by all tenants; applies "
        "only with --api-keys-file",
    )
    key_secret: KeySecret = Field(
        default=None,
        description="secret for store keys and cache salts, in addition to the tenant's name",
    )
    admin_api_key: AdminKey = Field(
        default=None,
        description="key for /metrics, /ui/state, /policies, /start_profile and /stop_profile; "
        "default: they answer only clients on this machine",
    )
    trusted_tenants: TenantNames = Field(
        default=(),
        description="tenants, comma-separated, that may set a request's priority and get the load "
        "of the decode instance; priorities of other tenants are dropped. Without --api-keys-file, "
        "every client may",
    )
    openai_api_key: Secret = Field(
        default=None,
        description="API key sent to the instances if the client sends no Authorization",
    )
    tenant_max_requests: int | None = Field(
        default=None,
        ge=1,
        description="maximum of concurrent requests of one tenant, queued ones included; further "
        "ones get 429; default: no limit",
    )
    tenant_requests_per_minute: int | None = Field(
        default=None,
        ge=1,
        description="maximum of requests of one tenant per minute; further ones get 429; default: "
        "no limit",
    )

    @model_validator(mode="after")
    def _check_tenants(self) -> Self:
        # Without keys all clients are one tenant, and any client could lock out the others.
        for flag in ("tenant_max_requests", "tenant_requests_per_minute"):
            if getattr(self, flag) is not None and self.api_keys_file is None:
                raise ValueError(f"{flag_of(flag)} needs --api-keys-file")
        if self.trusted_tenants and self.api_keys_file is None:
            raise ValueError("--trusted-tenants needs --api-keys-file")
        return self

    def trusts(self, tenant: Tenant) -> bool:
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
