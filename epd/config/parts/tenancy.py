"""Settings of whose requests are served, with whose keys, and what each has to itself."""

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
    """Settings of whose requests are served, with whose keys, and what each has to itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    api_keys_file: Path | None = Field(
        default=None,
        description="file of lines tenant:sha256, as `epd hash-key` prints them; with it, "
        "clients need a key, and theirs do not go on to the instances",
    )
    isolation: Literal["tenant", "shared"] = Field(
        default="tenant",
        description="whether each tenant has cache entries of its own or all share theirs; "
        "it matters with --api-keys-file alone",
    )
    key_secret: KeySecret = Field(
        default=None,
        description="what keys and salts are derived with, beside the tenant's name",
    )
    admin_api_key: AdminKey = Field(
        default=None,
        description="what opens /metrics, /ui/state, /policies, /start_profile and /stop_profile; "
        "without it they answer clients on this machine alone",
    )
    trusted_tenants: TenantNames = Field(
        default=(),
        description="tenants, comma-separated, whose requests may have a priority, and may ask for "
        "the load of the decode instance; the others' priorities are dropped. Without "
        "--api-keys-file every client may",
    )
    openai_api_key: Secret = Field(
        default=None,
        description="key sent to the instances where the client sends no Authorization",
    )
    tenant_max_requests: int | None = Field(
        default=None, ge=1, description="requests of one tenant at once, waiting ones included"
    )
    tenant_requests_per_minute: int | None = Field(
        default=None, ge=1, description="requests of one tenant in a minute"
    )

    @model_validator(mode="after")
    def _check_tenants(self) -> Self:
        # Without keys all clients are one tenant, and any of them could shut out the others.
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
        """What a tenant's keys and salts are derived under."""
        alone = self.isolation == "tenant" and tenant != ANONYMOUS
        return Scope(tenant if alone else None, self._secret)

    def name_scope_of(self, tenant: Tenant) -> Scope:
        """What the keys of a tenant's names are derived under: its own, whatever else is shared."""
        return Scope(tenant, self._secret)

    @property
    def _secret(self) -> bytes:
        secret = "" if self.key_secret is None else self.key_secret.get_secret_value()
        return secret.encode("utf-8", "surrogateescape")
