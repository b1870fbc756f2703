"""Files of keys and certificates for the workers that the first process starts.

The first process keeps copies of the last valid files. So a worker that replaces another gets the
same files as the other workers, even if they have changed since.
"""

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from epd.config import ProxyConfig
from epd.edge.keys_file import read_keys
from epd.edge.listening import server_context
from epd.http.tls import TlsInvalid
from epd.tenants import KeysInvalid

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
