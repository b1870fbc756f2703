"""Checks of the configuration and its files, by `epd check` too, and reloads of files at SIGHUP.

The API keys and the certificate are read again. If a file is invalid, the error is logged and the
previous content stays in force.

The first of several processes keeps copies of the last valid files for the workers that it starts.
A worker that replaces another gets the same files as the other workers, even if they have changed
since.
"""

import asyncio
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import structlog
from aiohttp import web

from epd.config import ConfigInvalid, ProxyConfig
from epd.config.flags import add_flags
from epd.config.load import Loaded, as_json, as_yaml, load
from epd.discovery.entries import EntriesInvalid
from epd.discovery.watching import check_file
from epd.edge.listening import server_context
from epd.http.tls import TlsInvalid, upstream_context
from epd.media.forward_proxy import ProxyInvalid, check_proxies
from epd.observe.tracing import TracesUnavailable, check_tracing
from epd.parser import Commands, Parser
from epd.tenants import ApiKeys, KeysInvalid, parse_keys
from epd.transfer.registry import KV_TRANSFERS


def add_parser(commands: Commands) -> None:
    """Add `check` to the commands of `epd`."""
    parser = commands.add_parser(
        "check",
        help="check the settings of `epd serve` with the same flags",
        description="Check flags, environment, the file of --config and the files that they name, "
        "and print all settings with their sources, as a file for --config. Secrets are hidden. "
        "Nothing is started.",
        epilog="example: epd check --config epd.yaml",
        usage="epd check [--format yaml|json] [FLAG of epd serve ...]",
    )
    parser.add_argument(
        "--format",
        choices=("yaml", "json"),
        default="yaml",
        help="format of the output (default: yaml)",
    )
    add_settings_command(parser, _check)


def add_settings_command(parser: Parser, run: Callable[..., None]) -> None:
    """Add the flags of all settings to a command, and set its function."""
    add_flags(parser)
    parser.set_defaults(run=partial(run, parser))


def _check(parser: Parser, *, format: str = "yaml", **flags: Any) -> None:  # noqa: A002 - a flag's name
    loaded = load_or_exit(parser, flags)
    print(as_json(loaded) if format == "json" else as_yaml(loaded))


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


def read_keys(config: ProxyConfig) -> ApiKeys | None:
    """Return the API keys of the keys file; None if none is configured.

    Raises:
        KeysInvalid: the keys file cannot be used.
    """
    if (path := config.api_keys_file) is None:
        return None
    keys, mode = _keys_in(path)
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        structlog.get_logger("epd").warning(
            "others may read or write the keys file", path=str(path), mode=f"{mode & 0o777:o}"
        )
    return keys


EVENTS_NEED = ("msgspec", "zmq")
"""Libraries of `--kv-events`."""


def unusable_files(config: ProxyConfig) -> Iterator[str]:
    """Yield an error message for each file, library or variable that cannot be used."""
    yield from _problems(lambda: server_context(config))
    yield from _problems(lambda: upstream_context(config.upstream_ca_file))
    if (instances := config.instances_file) is not None:
        transfer = KV_TRANSFERS[config.kv_transfer]()
        yield from _problems(
            lambda: check_file(instances, transfer), f"--instances-file {instances}: "
        )
    yield from _problems(lambda: check_tracing(config))
    if config.media_fetch_trust_env:
        yield from _problems(check_proxies)
    if config.kv_events and (
        missing := [module for module in EVENTS_NEED if find_spec(module) is None]
    ):
        yield (
            "--kv-events needs pip install '.[kv-events]' in the checkout: there is no "
            f"{' and no '.join(missing)}"
        )
    if (keys := config.api_keys_file) is not None:
        yield from _problems(lambda: _keys_in(keys), "--api-keys-file ")


def _problems(check: Callable[[], object], prefix: str = "") -> Iterator[str]:
    try:
        check()
    except (TlsInvalid, EntriesInvalid, TracesUnavailable, KeysInvalid, ProxyInvalid) as error:
        yield f"{prefix}{error}"


def _keys_in(path: Path) -> tuple[ApiKeys, int]:
    try:
        return parse_keys(path.read_bytes()), path.stat().st_mode
    except OSError as error:
        raise KeysInvalid(f"{path}: {error.strerror}") from None
    except KeysInvalid as error:
        raise KeysInvalid(f"{path}: {error}") from None


FILES = ("api_keys_file", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "upstream_ca_file")
"""Fields of `ProxyConfig` that name a file that a process reads at its start."""

CHECKS: Mapping[tuple[str, ...], Callable[[ProxyConfig], object]] = {
    ("api_keys_file",): read_keys,
    ("ssl_certfile", "ssl_keyfile"): server_context,
}
"""Fields with files that are reloaded together, and the function that raises if one is invalid."""


class LastGood:
    """Copies of the last valid files, in memory only: a private key is among them.

    Attributes:
        reloaded: event that the next `reload_files` sets and replaces by a new event.

    Raises:
        OSError: a file cannot be read.
    """

    def __init__(self, config: ProxyConfig) -> None:
        self.config = config
        self._copies = _copies(config, FILES)
        self.reloaded = asyncio.Event()

    @property
    def descriptors(self) -> Mapping[str, int]:
        """The descriptors of the present copies, by the fields that name the files."""
        return dict(self._copies)

    def reload_files(self) -> None:
        """Read the files again; keep the old version of each that is invalid.

        Nothing is logged here: the running workers reload the same files and log it.
        """
        for fields, check in CHECKS.items():
            with suppress(KeysInvalid, TlsInvalid, OSError):
                self._replace(fields, check)
        self.reloaded.set()
        self.reloaded = asyncio.Event()

    def _replace(self, fields: Iterable[str], check: Callable[[ProxyConfig], object]) -> None:
        copies = _copies(self.config, fields)
        try:
            check(read_from(self.config, {**self._copies, **copies}))
        except BaseException:
            _close(copies)
            raise
        _close({field: self._copies[field] for field in copies})
        self._copies.update(copies)

    def close(self) -> None:
        """Close the copies. Running workers have read theirs."""
        _close(self._copies)


def read_from(config: ProxyConfig, copies: Mapping[str, int]) -> ProxyConfig:
    """Return the configuration with the paths of its files replaced by those of the copies."""
    paths = {field: Path(f"/proc/self/fd/{copy}") for field, copy in copies.items()}
    return config.model_copy(update=paths)


def _copies(config: ProxyConfig, fields: Iterable[str]) -> dict[str, int]:
    named = {field: path for field in fields if (path := getattr(config, field)) is not None}
    contents = {field: path.read_bytes() for field, path in named.items()}
    return {field: _memory_file(content) for field, content in contents.items()}


def _memory_file(content: bytes) -> int:
    descriptor = os.memfd_create("epd")
    os.fchmod(descriptor, 0o600)
    with open(descriptor, "wb", closefd=False) as copy:
        copy.write(content)
    return descriptor


def _close(copies: Mapping[str, int]) -> None:
    for descriptor in copies.values():
        os.close(descriptor)


class Reload:
    """Steps of a reload, one per file."""

    def __init__(self, succeeded: Callable[[bool], None]) -> None:
        """Call `succeeded` after each reload with whether all steps succeeded."""
        self._succeeded = succeeded
        self._steps: dict[str, Callable[[], object]] = {}

    def add(self, what: str, step: Callable[[], object]) -> None:
        """Add a step that reloads a file. If it raises, it has changed nothing."""
        self._steps[what] = step

    def __call__(self) -> None:
        log = structlog.get_logger("epd")
        failed = False
        for what, step in self._steps.items():
            try:
                step()
            except (KeysInvalid, TlsInvalid) as error:
                failed = True
                log.error("not reloaded", what=what, reason=str(error))  # noqa: TRY400 - no bug
                continue
            log.info("reloaded", what=what)
        self._succeeded(not failed)


RELOAD = web.AppKey("reload", Reload)
