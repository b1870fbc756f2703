"""Settings of an operator, and the command-line flags for them.

The settings are the fields of the configuration, and the files that hold further settings. The help
and the documents show them in groups.

The parser also accepts the flags of vLLM's example proxies that have another name here, or no
effect: a script written for `disagg_epd_proxy.py` runs unchanged.
The help does not list these flags.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import orjson
from pydantic import AliasChoices, Field, SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

from epd.config.fields import AdminKey, Secret, flag_of
from epd.config.proxy_config import ProxyConfig

PREFIX = "EPD_"


class Settings(ProxyConfig, BaseSettings):
    """Fields of `ProxyConfig`, with their names in the environment."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, populate_by_name=True)

    config: Path | None = None
    """YAML file with settings by their names; flags and the environment override it"""
    key_secret_file: Path | None = None
    """file with the secret for store keys and cache salts"""
    admin_api_key_file: Path | None = None
    """file with the admin key"""
    openai_api_key_file: Path | None = None
    """file with the API key sent to the instances"""
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


def variables_of(name: str) -> list[str]:
    """Return the environment variables of a setting; the first one overrides the others."""
    alias = Settings.model_fields[name].validation_alias
    if isinstance(alias, AliasChoices):
        return [str(choice) for choice in alias.choices]
    return [PREFIX + name.upper()]


def name_of(name: str) -> str:
    """Return the flag of a setting, or the variable of a secret, for error messages."""
    return variables_of(name)[0] if name in SECRETS else flag_of(name)


GROUPS = (
    ("coordination", "policies skip_prefill_* local_prefill_url encode_below_* decode_choice"),
    ("coordination", "decode_from decode_header decode_hosts decode_picker_*"),
    ("instances", "*_urls ec_consumer_* kv_transfer"),
    ("conversations", "*conversation*"),
    ("instances", "*_kv_addrs ec_transfer ec_store *registration* instances_file discover*"),
    ("balance", "*_balance instance_weights kv_events* load_interval_s session_header"),
    ("logging", "log_*"),
    ("traces", "otlp_*"),
    ("tenants", "tenant_* trusted_tenants"),
    ("health of instances", "eject_* probe_*"),
    ("deadlines", "*_s"),
    ("limits", "max_* stream_interval *_rate_bytes min_*"),
    ("media", "*media* trust_request_mm_kwargs"),
    ("tenants", "api_keys_file isolation"),
    ("secrets", "*_key_file *_key key_secret*"),
    ("TLS", "ssl_* upstream_ca_file"),
    ("CORS", "allowed_origins allowed_methods allowed_headers allow_credentials"),
    ("server", "*"),
)
"""Groups of settings with patterns of names: the first pattern that matches applies."""

TITLES = (
    "instances",
    "server",
    "media",
    "coordination",
    "balance",
    "limits",
    "deadlines",
    "health of instances",
    "conversations",
    "tenants",
    "secrets",
    "TLS",
    "CORS",
    "logging",
    "traces",
)
"""Groups in the order of the help: first what every operator sets."""


def group_of(name: str) -> str:
    """Return the title of a setting's group."""
    return next(
        title for title, names in GROUPS if any(fnmatch(name, pattern) for pattern in names.split())
    )


RENAMED: Mapping[str, str] = {
    "--probe-interval": "probe_interval_s",
    "--probe-timeout": "health_timeout_s",
    "--fail-threshold": "eject_after",
}
"""Settings that these flags set."""

SWITCHES: Mapping[str, tuple[str, str]] = {
    "--no-rewrite": ("decode_media", "raw"),
    "--log-requests": ("log_level", "debug"),
}
"""Settings and values that these flags stand for."""

IDLE: Mapping[str, str] = {
    "--decode-retries": "does nothing here: the proxy retries without it",
    "--evicted-ttl": "does nothing here: registrations do not expire",
}
"""Reasons why these flags have no effect."""


class _Idle(argparse.Action):
    """Action that warns that a flag has no effect."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        del namespace, values
        sys.stderr.write(f"{parser.prog}: warning: {option_string} {self.const}\n")


def add_example_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser. The parsed namespace has only the settings of given flags."""
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for flag, name in RENAMED.items():
        parser.add_argument(flag, dest=name, **hidden)
    for flag, (name, value) in SWITCHES.items():
        parser.add_argument(flag, dest=name, action="store_const", const=value, **hidden)
    for flag, why in IDLE.items():
        parser.add_argument(flag, action=_Idle, const=why, **hidden)


METAVARS: Mapping[str, tuple[str, ...]] = {
    "URLS": ("_urls",),
    "URL": ("_url", "_store", "_endpoint"),
    "POLICIES": ("policies",),
    "NAME": ("_header",),
    "ADDRESSES": ("_addrs",),
    "ADDRESS": ("_server", "host"),
    "HOSTS": ("_hosts", "_domains"),
    "WEIGHTS": ("_weights",),
    "SECONDS": ("_s", "_ttl"),
    "BYTES": ("_bytes",),
    "FILE": ("file", "config", "_ca_certs"),
    "PREFIX": ("root_path",),
    "FOLDER": ("_path",),
    "PATH": ("uds",),
    "NAMES": ("_tenants",),
    "LIST": ("_origins", "_methods", "_headers"),
}
"""Placeholders of values in the help, with the ends of the settings' names: the first applies."""

NUMBERS: Mapping[object, str] = {int: "N", int | None: "N"}
"""Placeholders of values by type, if the name has none."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting that is not a secret.

    The parsed namespace has only the settings of given flags.
    """
    groups = {title: parser.add_argument_group(title) for title in TITLES}
    for name, field in Settings.model_fields.items():
        if name in SECRETS:
            continue
        value: dict[str, Any]
        if field.annotation is bool:
            value = {"action": argparse.BooleanOptionalAction}
        elif get_origin(field.annotation) is Literal:
            # Not `choices`: the model checks the value, and reports it along with other errors.
            value = {"metavar": f"{{{','.join(get_args(field.annotation))}}}"}
        else:
            value = {"metavar": metavar_of(name, field)}
        groups[group_of(name)].add_argument(
            flag_of(name), default=argparse.SUPPRESS, help=_help(field), **value
        )
    add_example_flags(parser)


def metavar_of(name: str, field: FieldInfo) -> str:
    """Return the placeholder of a setting's value.

    Raises:
        KeyError: the setting has no placeholder; add one to `METAVARS`.
    """
    for metavar, endings in METAVARS.items():
        if name.endswith(endings):
            return metavar
    return "HOST:PORT" if name.startswith("discover_") else NUMBERS[field.annotation]


def _help(field: FieldInfo) -> str:
    if field.annotation is bool or field.default in (None, ()):
        return field.description or ""
    return f"{field.description} (default: {shown_default(field)})"


def shown_default(field: FieldInfo) -> str:
    """Return a default as an operator would write it: a list as JSON."""
    default = field.default
    return orjson.dumps(default).decode() if isinstance(default, tuple) else str(default)
