"""Command-line flags of the settings."""

import argparse
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args, get_origin

import orjson
from pydantic.fields import FieldInfo

from epd.config.example_flags import add_example_flags
from epd.config.groups import GROUPS, group_of
from epd.config.settings import SECRETS, Settings, flag_of

METAVARS: Mapping[str, str] = MappingProxyType(
    {
        "_urls": "URLS",
        "_url": "URL",
        "_store": "URL",
        "_endpoint": "URL",
        "policies": "POLICIES",
        "_header": "NAME",
        "_addrs": "ADDRESSES",
        "_server": "ADDRESS",
        "host": "ADDRESS",
        "_hosts": "HOSTS",
        "_domains": "HOSTS",
        "_weights": "WEIGHTS",
        "_s": "SECONDS",
        "_ttl": "SECONDS",
        "_bytes": "BYTES",
        "file": "FILE",
        "config": "FILE",
        "_ca_certs": "FILE",
        "root_path": "PREFIX",
        "_path": "FOLDER",
        "uds": "PATH",
        "_tenants": "NAMES",
        "_origins": "LIST",
        "_methods": "LIST",
        "_headers": "LIST",
    }
)
"""Placeholders of values in the help, by the end of the setting's name."""

NUMBERS: Mapping[object, str] = MappingProxyType({int: "N", int | None: "N"})
"""Placeholders of values by type, if the name has none."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting that is not a secret.

    The parsed namespace has only the settings of given flags.
    """
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(GROUPS.values())}
    for name, field in Settings.model_fields.items():
        if name in SECRETS:
            continue
        if field.annotation is bool:
            groups[group_of(name)].add_argument(
                flag_of(name),
                default=argparse.SUPPRESS,
                action=argparse.BooleanOptionalAction,
                help=field.description,
            )
            continue
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else None
        groups[group_of(name)].add_argument(
            flag_of(name),
            default=argparse.SUPPRESS,
            choices=choices,
            metavar=None if choices else metavar_of(name, field),
            help=_help(field),
        )
    add_example_flags(parser)


def metavar_of(name: str, field: FieldInfo) -> str:
    """Return the placeholder of a setting's value.

    Raises:
        KeyError: the setting has no placeholder; add one to `METAVARS`.
    """
    for ending, metavar in METAVARS.items():
        if name.endswith(ending):
            return metavar
    return "HOST:PORT" if name.startswith("discover_") else NUMBERS[field.annotation]


def _help(field: FieldInfo) -> str:
    if field.is_required() or field.default in (None, ()):
        return f"{field.description}"
    return f"{field.description} (default: {shown_default(field)})"


def shown_default(field: FieldInfo) -> str:
    """Return a default as an operator would write it: a list as JSON."""
    default = field.default
    return orjson.dumps(default).decode() if isinstance(default, tuple) else str(default)
