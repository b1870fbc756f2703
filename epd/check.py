"""`epd check`: the settings of `epd serve` with their sources, and the files that they name."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from epd.config import ConfigInvalid, ProxyConfig
from epd.config.flags import SECRETS, add_flags
from epd.config.load import Loaded, load, load_running
from epd.config.shown import PublicSettings, as_yaml
from epd.config.sources import from_environment
from epd.discovery.entries import EntriesInvalid, read_rows
from epd.discovery.instances_file import check_file
from epd.edge.files import read_keys
from epd.edge.listening import server_context
from epd.http.tls import TlsInvalid, upstream_context
from epd.media.forward_proxy import ProxyInvalid, forward_proxies
from epd.observe.tracing import TracesUnavailable, check_tracing
from epd.parser import Commands, Parser, admin_key, http_url
from epd.routing.instances import Instance
from epd.running_proxy import NoAnswer, ask_proxy, find_proxy
from epd.tenants import KeysInvalid
from epd.transfer.registry import load_kv_transfer
from epd.version import __version__

BY_URL = (
    "With --url, or without flags and variables, they are those of a running proxy; "
    "EPD_ADMIN_API_KEY or ADMIN_API_KEY is its admin key."
)


def add_parser(commands: Commands) -> None:
    """Add `check` to the commands of `epd`."""
    parser = commands.add_parser(
        "check",
        help="check the settings of `epd serve` with the same flags",
        description="Check flags, environment, the file of --config and the files that they name, "
        "and print all settings with their sources, as a file for --config. Secrets are hidden. "
        "Nothing is started. " + BY_URL,
        epilog="example: epd check --config epd.yaml",
        usage="epd check [--url URL] [FLAG of epd serve ...]",
    )
    add_url(parser)
    add_settings_command(parser, _check)


def add_url(parser: Parser) -> None:
    """Add the flag that names a running proxy."""
    text = (
        "URL of a running proxy: its settings and instances are used, and flags replace its own "
        "(default without flags and variables: that of the fleet of `epd up` on this host, "
        "otherwise http://127.0.0.1:8000)"
    )
    parser.add_argument("--url", type=http_url, metavar="URL", help=text)


def add_settings_command(parser: Parser, run: Callable[..., None]) -> None:
    """Add the flags of all settings to a command, and set its function."""
    add_flags(parser)
    parser.set_defaults(run=partial(run, parser))


def _check(parser: Parser, *, url: str | None, **flags: Any) -> None:
    print(as_yaml(load_or_ask(parser, url, flags)[0]))


def load_or_ask(
    parser: Parser, url: str | None, flags: Mapping[str, Any]
) -> tuple[Loaded, Sequence[Instance] | None]:
    """Return the configuration, and the instances of the running proxy that has it.

    The proxy is the one at `url`. Without a URL, flags and variables, it is that of `find_proxy`;
    otherwise there is none, and no instances are returned. Exit with the errors of settings, or
    if the proxy does not answer.
    """
    try:
        if url is None:
            if flags or any(
                name.removesuffix("_file") not in SECRETS for name in from_environment()
            ):
                return load_or_exit(parser, flags), None
            url = find_proxy()
        elif "config" in flags:
            parser.error("--config and --url exclude each other")
        page = ask_proxy(url, "/settings", admin_key(), PublicSettings.__required_keys__)
        if page["version"] != __version__:
            print(f"{parser.prog}: warning: {url} has version {page['version']}", file=sys.stderr)
        loaded = load_running(flags, url, page["settings"], page["hidden"])
        return loaded, read_rows(page["instances"])
    except NoAnswer as error:
        sys.exit(f"{parser.prog}: {error}")
    except (ConfigInvalid, EntriesInvalid) as invalid:
        parser.errors(getattr(invalid, "reasons", [str(invalid)]))


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
