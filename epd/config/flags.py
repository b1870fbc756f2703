"""Settings of an operator, and the command-line flags for them.

The settings are the fields of the configuration, and the files that hold further settings. The help
and the documents show them in groups.

The parser also accepts the flags of vLLM's example proxies that have another name here, or no
effect: a script written for `disagg_epd_proxy.py` runs unchanged.
The help does not list these flags.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import orjson
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from epd.config.fields import Section
from epd.config.proxy_config import ProxyConfig
from epd.config.sections.instances import InstanceSettings
from epd.config.sections.limits import LimitSettings, MediaSettings
from epd.config.sections.routing import RouteSettings
from epd.config.sections.serving import CrossOriginSettings, ServingSettings, TenancySettings
from epd.config.sections.transfers import TransferSettings
from epd.parser import flag_of

PREFIX = "EPD_"


class FileSettings(Section):
    """Fields for files that hold further settings."""

    config: Path | None = None
    """YAML file with settings by their names; flags and the environment override it"""
    key_secret_file: Path | None = None
    """file with the secret for store keys and cache salts"""
    admin_api_key_file: Path | None = None
    """file with the admin key"""
    openai_api_key_file: Path | None = None
    """file with the API key sent to the instances"""


FIELDS: Mapping[str, FieldInfo] = ProxyConfig.model_fields | FileSettings.model_fields
"""All settings by name."""

SECRETS = tuple(
    name for name, field in FIELDS.items() if SecretStr in getattr(field.annotation, "__args__", ())
)
"""Fields without a flag and not allowed in the YAML file: other users may read both."""

SHARED = ("admin_api_key", "openai_api_key")
"""Secrets with a second variable, which has no prefix: other programs name it so."""

GROUPS: Mapping[str, type[Section]] = {
    "instances": InstanceSettings,
    "server": ServingSettings,
    "media": MediaSettings,
    "routing": RouteSettings,
    "transfers": TransferSettings,
    "limits": LimitSettings,
    "tenants": TenancySettings,
    "CORS": CrossOriginSettings,
    "files": FileSettings,
}
"""Groups of settings in the order of the help: first what every operator sets."""


def variables_of(name: str) -> list[str]:
    """Return the environment variables of a setting; the first one overrides the others."""
    variable = name.upper()
    return [PREFIX + variable, variable] if name in SHARED else [PREFIX + variable]


def name_of(name: str) -> str:
    """Return the flag of a setting, or the variable of a secret, for error messages."""
    return variables_of(name)[0] if name in SECRETS else flag_of(name)


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
    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any, **_: Any) -> None:
        sys.stderr.write(f"{parser.prog}: warning: {arguments[-1]} {self.const}\n")


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
    "NAME": ("_header", "_transfer"),
    "ADDRESSES": ("_addrs",),
    "HOST:PORT": ("discover_encode", "discover_prefill", "discover_decode", "_prefill_decode"),
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
    "LIST": ("_origins",),
}
"""Placeholders of values in the help, with the ends of the settings' names: the first applies.
All other settings are numbers, `N`."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting that is not a secret.

    The parsed namespace has only the settings of given flags.
    """
    for title, section in GROUPS.items():
        group = parser.add_argument_group(title)
        for name, field in section.model_fields.items():
            if name not in SECRETS:
                _add_flag(group, name, field)
    add_example_flags(parser)


def _add_flag(group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
    value: dict[str, Any] = {"metavar": metavar_of(name)}
    if field.annotation is bool:
        value = {"action": argparse.BooleanOptionalAction}
    elif get_origin(field.annotation) is Literal:
        # Not `choices`: the model checks the value, and reports it along with other errors.
        value = {"metavar": f"{{{','.join(get_args(field.annotation))}}}"}
    group.add_argument(flag_of(name), default=argparse.SUPPRESS, help=_help(field), **value)


def metavar_of(name: str) -> str:
    """Return the placeholder of a setting's value."""
    return next((metavar for metavar, ends in METAVARS.items() if name.endswith(ends)), "N")


def _help(field: FieldInfo) -> str:
    if field.annotation is bool or field.default in (None, ()):
        return field.description or ""
    return f"{field.description} (default: {shown_default(field)})"


def shown_default(field: FieldInfo) -> str:
    """Return a default as an operator would write it: a list as JSON."""
    default = field.default
    return orjson.dumps(default).decode() if isinstance(default, tuple) else str(default)
