"""The `epd` command."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from functools import partial
from typing import Annotated, Any, Literal, get_args, get_origin

import uvloop
from pydantic import AliasChoices, BeforeValidator, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

from epd import bench, fleet
from epd.config import AdminKey, ProxyConfig
from epd.discovery.entries import EntriesInvalid
from epd.discovery.watching import check_file
from epd.edge.descriptors import raise_limit
from epd.http.tls import TlsInvalid, server_context, upstream_context
from epd.observe import logs
from epd.parser import Parser
from epd.server.serve import serve
from epd.server.web import create_app
from epd.server.workers import WorkersFailed, supervise
from epd.tenants import KeysInvalid, key_line, new_key
from epd.version import __version__

GROUPS = {
    "*_urls": "instances",
    "ec_consumer_*": "instances",
    "*registration*": "instances",
    "instances_file": "instances",
    "discover*": "instances",
    "log_*": "logging",
    "tenant_*": "tenants",
    "eject_*": "health of instances",
    "probe_*": "health of instances",
    "*_s": "deadlines",
    "max_*": "limits",
    "*_rate_bytes": "limits",
    "min_*": "limits",
    "*media*": "media",
    "trust_request_mm_kwargs": "media",
    "api_keys_file": "tenants",
    "isolation": "tenants",
    "ssl_*": "TLS",
    "upstream_ca_file": "TLS",
    "*": "server",
}
"""Where a field's flag stands in the help: under the first pattern that fits."""


class Settings(ProxyConfig, BaseSettings):
    """`ProxyConfig` from flags, then `EPD_…` of the environment, then its defaults."""

    model_config = SettingsConfigDict(env_prefix="EPD_")

    openai_api_key: Annotated[SecretStr | None, BeforeValidator(lambda key: key or None)] = Field(
        default=None, validation_alias=AliasChoices("EPD_OPENAI_API_KEY", "OPENAI_API_KEY")
    )
    admin_api_key: AdminKey = Field(
        default=None, validation_alias=AliasChoices("EPD_ADMIN_API_KEY", "ADMIN_API_KEY")
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Exits with 2 where its flags are wrong, with 1 where it fails."""
    parser = Parser(prog="epd", description="Multimodal EPD proxy for vLLM.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"epd {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    serve_parser = commands.add_parser(
        "serve",
        help="run the proxy",
        description="Run an OpenAI-compatible proxy that sends media to encode instances, then "
        "the request to prefill and decode instances. Every flag can be set as EPD_<FLAG> in the "
        "environment too; OPENAI_API_KEY is sent to the instances where a client sends no key, "
        "ADMIN_API_KEY opens /metrics and profiling.",
        epilog="example: epd serve --encode-servers-urls http://e1:8001,http://e2:8001 "
        "--decode-servers-urls http://pd:8002",
        usage="epd serve --encode-servers-urls URLS --decode-servers-urls URLS [FLAG ...]",
        allow_abbrev=False,
    )
    _add_flags(serve_parser)
    serve_parser.set_defaults(run=partial(_serve, serve_parser))
    key_parser = commands.add_parser(
        "hash-key",
        help="make an API key, or hash one",
        description="Print a line for --api-keys-file. The file holds hashes alone: a new key is "
        "shown on stderr, this once.",
        epilog="example: epd hash-key alice >> keys",
        allow_abbrev=False,
    )
    key_parser.add_argument("tenant", metavar="TENANT", help="whose key it is")
    key_parser.add_argument("--stdin", action="store_true", help="hash the key in stdin's line")
    key_parser.set_defaults(run=partial(_hash_key, key_parser))
    fleet.command.add_parser(commands)
    bench.command.add_parser(commands)
    flags = vars(parser.parse_args(argv))
    del flags["command"]
    flags.pop("run")(**flags)


def _hash_key(parser: Parser, tenant: str, *, stdin: bool) -> None:
    try:
        key = sys.stdin.readline().strip() if stdin else new_key()
        line = key_line(tenant, key)
    except ValueError as error:
        parser.error(str(error))
    if not stdin:
        print(key, file=sys.stderr)
    print(line)


def _settings(parser: Parser, flags: dict[str, Any]) -> ProxyConfig:
    try:
        return Settings(**flags)
    except ValidationError as invalid:
        first = invalid.errors()[0]
        field = "_".join(str(part) for part in first["loc"][:1])
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "missing":
            message = "is required"
        return parser.error(f"{_setting(field)} {message}" if field else message)


def _serve(parser: Parser, **flags: Any) -> None:
    config = _settings(parser, flags)
    logs.configure(config.log_format, config.log_level)
    raise_limit()
    try:
        server_context(config)
        upstream_context(config.upstream_ca_file)
        if config.instances_file is not None:
            check_file(config.instances_file)
        if config.workers == 1:
            uvloop.run(serve(config))
        else:
            create_app(config)  # what a worker would die of is said here
            asyncio.run(supervise(config))  # uvloop's processes have no process_group
    except KeysInvalid as error:
        parser.error(f"--api-keys-file {error}")
    except TlsInvalid as error:
        parser.error(str(error))
    except EntriesInvalid as error:
        parser.error(f"--instances-file {config.instances_file}: {error}")
    except WorkersFailed as failure:
        sys.exit(f"epd serve: {failure}")
    except OSError as error:
        sys.exit(f"epd serve: cannot listen on {config.host}:{config.port}: {error.strerror}")


def _add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per field of `ProxyConfig`, but for secrets, which come by environment only."""
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(GROUPS.values())}
    for name, field in ProxyConfig.model_fields.items():
        if _is_secret(field):
            continue
        if field.annotation is bool:
            groups[_group(name)].add_argument(
                _flag(name),
                default=argparse.SUPPRESS,
                action=argparse.BooleanOptionalAction,
                help=field.description,
            )
            continue
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else None
        groups[_group(name)].add_argument(
            _flag(name),
            default=argparse.SUPPRESS,
            choices=choices,
            metavar=None if choices else _metavar(name, field),
            help=_help(field),
        )


def _group(field: str) -> str:
    return next(title for pattern, title in GROUPS.items() if fnmatch(field, pattern))


def _is_secret(field: FieldInfo) -> bool:
    return SecretStr in get_args(field.annotation)


def _setting(name: str) -> str:
    """What the operator set: the flag, or the variable of what has none."""
    if name.isupper():  # a variable by a name of its own
        return name
    field = ProxyConfig.model_fields.get(name)
    return f"EPD_{name.upper()}" if field is not None and _is_secret(field) else _flag(name)


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _metavar(name: str, field: FieldInfo) -> str:
    if name in {
        "discover_encode",
        "discover_prefill",
        "discover_decode",
        "discover_prefill_decode",
    }:
        return "HOST:PORT"
    for suffix, metavar in (
        ("_urls", "URLS"),
        ("_store", "URL"),
        ("_hosts", "HOSTS"),
        ("_server", "ADDRESS"),
        ("_s", "SECONDS"),
        ("_bytes", "BYTES"),
        ("file", "FILE"),
        ("_ca_certs", "FILE"),
        ("_domains", "HOSTS"),
    ):
        if name.endswith(suffix):
            return metavar
    return {int: "N", int | None: "N", str: "ADDRESS"}.get(field.annotation, "FOLDER")  # type: ignore[arg-type]


def _help(field: FieldInfo) -> str:
    default = "" if field.is_required() or field.default in (None, ()) else f" ({field.default})"
    return f"{field.description}{default}"
