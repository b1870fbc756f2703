"""What an operator can set: the configuration's fields, and the files where more of it stands."""

from pathlib import Path

from pydantic import AliasChoices, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from epd.config.fields import AdminKey, Secret
from epd.config.model import ProxyConfig

PREFIX = "EPD_"


class Settings(ProxyConfig, BaseSettings):
    """`ProxyConfig`'s fields, by the names that they have in the environment too."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, populate_by_name=True)

    config: Path | None = Field(
        default=None,
        description="YAML file of settings by their names; flags and the environment go before it",
    )
    key_secret_file: Path | None = Field(
        default=None, description="file of what keys and salts are derived with"
    )
    admin_api_key_file: Path | None = Field(
        default=None, description="file of the key that opens /metrics and profiling"
    )
    openai_api_key_file: Path | None = Field(
        default=None, description="file of the key sent to the instances"
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
"""Fields that have no flag and no place in a file of settings, which others can read."""


def flag_of(name: str) -> str:
    """What a setting is called on the command line."""
    return "--" + name.replace("_", "-")


def variables_of(name: str) -> list[str]:
    """What a setting is called in the environment; the first goes before the others."""
    alias = Settings.model_fields[name].validation_alias
    if isinstance(alias, AliasChoices):
        return [str(choice) for choice in alias.choices]
    return [PREFIX + name.upper()]


def name_of(name: str) -> str:
    """What to set: the flag, or the variable of what has none."""
    return variables_of(name)[0] if name in SECRETS else flag_of(name)
