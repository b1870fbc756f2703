"""The configuration, and copies of files, as they were when last found good.

The first of several processes holds them for the workers it starts: one that replaces another has
what those beside it have, whatever has become of the files since.
"""

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import orjson

from epd.config import ConfigInvalid, ProxyConfig
from epd.config.live import LiveConfig
from epd.edge.tls import server_context
from epd.http.tls import TlsInvalid
from epd.observe.logs import set_level
from epd.server.files import read_keys
from epd.tenants import KeysInvalid

FILES = ("api_keys_file", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "upstream_ca_file")
"""Fields of `ProxyConfig` that name a file whose content a process has from its start."""

CHECKS: Mapping[tuple[str, ...], Callable[[ProxyConfig], object]] = MappingProxyType(
    {("api_keys_file",): read_keys, ("ssl_certfile", "ssl_keyfile"): server_context}
)
"""What is read anew together, and what raises where it cannot be used."""


class LastGood:
    """The copies: in memory alone, since a private key is among them.

    Attributes:
        reloaded: set at the next `renew`, by which there is another event in its place.
        said: what the workers are told of the configuration, once it has been read anew.

    Raises:
        OSError: a file cannot be read.
    """

    def __init__(self, live: LiveConfig, read: Callable[[], ProxyConfig]) -> None:
        self._live = live
        self._read = read
        self.said = b""
        self._copies = _copies(live.current, FILES)
        self.reloaded = asyncio.Event()

    @property
    def config(self) -> ProxyConfig:
        """What is in force."""
        return self._live.current

    @property
    def descriptors(self) -> Mapping[str, int]:
        """The copies of this moment, by the fields that name the files."""
        return dict(self._copies)

    def renew(self) -> None:
        """Take what can be used of what is there now, and keep the rest as it was.

        It says nothing: the workers that run are told the same, and do.
        """
        self.said = self._reconfigured()
        for fields, check in CHECKS.items():
            with suppress(KeysInvalid, TlsInvalid, OSError):
                self._replace(fields, check)
        self.reloaded.set()
        self.reloaded = asyncio.Event()

    def _reconfigured(self) -> bytes:
        try:
            wanted = self._read()
            self._live.adopt(wanted)
        except ConfigInvalid as invalid:
            return orjson.dumps({"refused": invalid.reasons})
        set_level(self.config.log_level)
        return orjson.dumps({"config": orjson.Fragment(wanted.to_json())})

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
        """Let go of the copies. Workers that run have read theirs."""
        _close(self._copies)


def read_from(config: ProxyConfig, copies: Mapping[str, int]) -> ProxyConfig:
    """The same configuration, but for its files: they are these copies."""
    paths = {field: Path(f"/proc/self/fd/{copy}") for field, copy in copies.items()}
    return config.model_copy(update=paths)


def _copies(config: ProxyConfig, fields: Iterable[str]) -> dict[str, int]:
    named = {field: path for field in fields if (path := getattr(config, field)) is not None}
    contents = {field: path.read_bytes() for field, path in named.items()}
    return {field: _in_memory(content) for field, content in contents.items()}


def _in_memory(content: bytes) -> int:
    descriptor = os.memfd_create("epd")
    os.fchmod(descriptor, 0o600)
    with open(descriptor, "wb", closefd=False) as copy:
        copy.write(content)
    return descriptor


def _close(copies: Mapping[str, int]) -> None:
    for descriptor in copies.values():
        os.close(descriptor)
