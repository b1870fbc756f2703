"""`epd check`: the settings of `epd serve` with their sources, and the files that they name."""

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

from epd.config import ConfigInvalid, ProxyConfig
from epd.config.flags import add_flags
from epd.config.load import Loaded, as_yaml, load
from epd.discovery.entries import EntriesInvalid
from epd.discovery.instances_file import check_file
from epd.edge.files import read_keys
from epd.edge.listening import server_context
from epd.http.tls import TlsInvalid, upstream_context
from epd.media.forward_proxy import ProxyInvalid, forward_proxies
from epd.observe.tracing import TracesUnavailable, check_tracing
from epd.parser import Commands, Parser
from epd.tenants import KeysInvalid
from epd.transfer.registry import load_kv_transfer


def add_parser(commands: Commands) -> None:
    """Add `check` to the commands of `epd`."""
    parser = commands.add_parser(
        "check",
        help="check the settings of `epd serve` with the same flags",
        description="Check flags, environment, the file of --config and the files that they name, "
        "and print all settings with their sources, as a file for --config. Secrets are hidden. "
        "Nothing is started.",
        epilog="example: epd check --config epd.yaml",
        usage="epd check [FLAG of epd serve ...]",
    )
    add_settings_command(parser, _check)


def add_settings_command(parser: Parser, run: Callable[..., None]) -> None:
    """Add the flags of all settings to a command, and set its function."""
    add_flags(parser)
    parser.set_defaults(run=partial(run, parser))


def _check(parser: Parser, **flags: Any) -> None:
    print(as_yaml(load_or_exit(parser, flags)))


def load_or_exit(parser: Parser, flags: Mapping[str, Any]) -> Loaded:
    """Return the configuration, or exit with the errors of settings and of the files they name."""
    try:
        loaded = load(flags)
    except ConfigInvalid as invalid:
        parser.errors(invalid.reasons)
    if reasons := list(unusable_files(loaded.config)):
        parser.errors(reasons)
    for message in loaded.unknown:
        print(f"{parser.prog}: warning: {message}", file=sys.stderr)
    return loaded


def unusable_files(config: ProxyConfig) -> Iterator[str]:
    """Yield an error message for each file, library or variable that cannot be used."""
    yield from _problems(lambda: server_context(config))
    yield from _problems(lambda: upstream_context(config.upstream_ca_file))
    if (instances := config.instances_file) is not None:
        transfer = load_kv_transfer(config.kv_transfer)
        yield from _problems(
            lambda: check_file(instances, transfer), f"--instances-file {instances}: "
        )
    yield from _problems(lambda: check_tracing(config))
    if config.media_fetch_trust_env:
        yield from _problems(forward_proxies)
    if config.kv_events and find_spec("zmq") is None:
        yield "--kv-events needs pip install 'epd-proxy[kv-events]': there is no zmq"
    yield from _problems(lambda: read_keys(config), "--api-keys-file ")


def _problems(check: Callable[[], object], prefix: str = "") -> Iterator[str]:
    try:
        check()
    except (TlsInvalid, EntriesInvalid, TracesUnavailable, KeysInvalid, ProxyInvalid) as error:
        yield f"{prefix}{error}"
