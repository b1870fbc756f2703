"""Checks at the start of what the configuration names: files, and the optional tracing library."""

import stat
from collections.abc import Iterator
from pathlib import Path

import structlog

from epd.config import ProxyConfig
from epd.discovery.entries import EntriesInvalid
from epd.discovery.watching import check_file
from epd.edge.tls import server_context
from epd.http.tls import TlsInvalid, upstream_context
from epd.observe.tracing import TracesUnavailable, check_tracing
from epd.tenants import ApiKeys, KeysInvalid, parse_keys
from epd.transfer.flavours import KV_TRANSFERS


def read_keys(config: ProxyConfig) -> ApiKeys | None:
    """Return the API keys of the keys file; None if none is configured.

    Raises:
        KeysInvalid: the keys file cannot be used.
    """
    path = config.api_keys_file
    if path is None:
        return None
    keys, mode = _keys_in(path)
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        structlog.get_logger("epd").warning(
            "others may read or write the keys file", path=str(path), mode=f"{mode & 0o777:o}"
        )
    return keys


def unusable_files(config: ProxyConfig) -> Iterator[str]:
    """Yield an error message for each file or library that cannot be used."""
    try:
        server_context(config)
    except TlsInvalid as error:
        yield str(error)
    try:
        upstream_context(config.upstream_ca_file)
    except TlsInvalid as error:
        yield str(error)
    try:
        if config.instances_file is not None:
            check_file(config.instances_file, KV_TRANSFERS[config.kv_transfer]())
    except EntriesInvalid as error:
        yield f"--instances-file {config.instances_file}: {error}"
    try:
        check_tracing(config)
    except TracesUnavailable as error:
        yield str(error)
    try:
        if config.api_keys_file is not None:
            _keys_in(config.api_keys_file)
    except KeysInvalid as error:
        yield f"--api-keys-file {error}"


def _keys_in(path: Path) -> tuple[ApiKeys, int]:
    """Return the keys of a file, and the file's mode."""
    try:
        return parse_keys(path.read_bytes()), path.stat().st_mode
    except OSError as error:
        raise KeysInvalid(f"{path}: {error.strerror}") from None
    except KeysInvalid as error:
        raise KeysInvalid(f"{path}: {error}") from None
