"""Settings of an operator: the configuration's fields, and the files that hold further settings."""

from pathlib import Path

from pydantic import AliasChoices, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from epd.config.fields import AdminKey, Secret
from epd.config.model import ProxyConfig

PREFIX = "EPD_"


class Settings(ProxyConfig, BaseSettings):
    """Fields of `ProxyConfig`, with their names in the environment."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, populate_by_name=True)

    config: Path | None = Field(
        default=None,
        description="YAML file with settings by their names; flags and the environment override it",
    )
    key_secret_file: Path | None = Field(
        default=None, description="file with the secret for store keys and cache salts"
    )
    admin_api_key_file: Path | None = Field(default=None, description="file with the admin key")
    openai_api_key_file: Path | None = Field(
        default=None, description="file with the API key sent to the instances"
    )

    openai_api_key: Secret = Field(
        default=None,
        validation_alias=AliasChoices("EPD_OPENAI_API_KEY", "OPENAI_API_KEY"),
        description=ProxyConfig.model_fields["openai_api_key"].description,
    )
    admin_api_key: AdminKey = Field(
        default=None,
        validation_alias=AliasChoices("EPD_ADMIN_API_KEY", "ADMIN_API_KEY"),
        description=ProxyConfig.model_fields["admin_api_key"].description,
    )


SECRETS = tuple(
    name
    for name, field in ProxyConfig.model_fields.items()
    if SecretStr in getattr(field.annotation, "__args__", ())
)
"""Fields without a flag and not allowed in the YAML file: other users may read both."""


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


def variables_of(name: str) -> list[str]:
    """Return the environment variables of a setting; the first one overrides the others."""
    alias = Settings.model_fields[name].validation_alias
    if isinstance(alias, AliasChoices):
        return [str(choice) for choice in alias.choices]
    return [PREFIX + name.upper()]


def name_of(name: str) -> str:
    """Return the flag of a setting, or the variable of a secret, for error messages."""
    return variables_of(name)[0] if name in SECRETS else flag_of(name)
