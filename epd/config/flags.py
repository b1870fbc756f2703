"""Settings as flags of a command."""

import argparse
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from epd.config.example_flags import add_example_flags
from epd.config.groups import GROUPS, group_of
from epd.config.settings import SECRETS, Settings, flag_of


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each setting, but for secrets. Parsed, it has those alone that were given."""
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
    """What stands for a value."""
    if name in {
        "discover_encode",
        "discover_prefill",
        "discover_decode",
        "discover_prefill_decode",
    }:
        return "HOST:PORT"
    for suffix, metavar in (
        ("_urls", "URLS"),
        ("_url", "URL"),
        ("policies", "POLICIES"),
        ("_header", "NAME"),
        ("_addrs", "ADDRESSES"),
        ("_endpoint", "URL"),
        ("registration_store", "URL"),
        ("_hosts", "HOSTS"),
        ("_server", "ADDRESS"),
        ("_weights", "WEIGHTS"),
        ("_header", "NAME"),
        ("_s", "SECONDS"),
        ("_bytes", "BYTES"),
        ("file", "FILE"),
        ("config", "FILE"),
        ("ec_store", "URL"),
        ("_ca_certs", "FILE"),
        ("_domains", "HOSTS"),
    ):
        if name.endswith(suffix):
            return metavar
    return {int: "N", int | None: "N", str: "ADDRESS"}.get(field.annotation, "FOLDER")  # type: ignore[arg-type]


def _help(field: FieldInfo) -> str:
    default = "" if field.is_required() or field.default in (None, ()) else f" ({field.default})"
    return f"{field.description}{default}"
