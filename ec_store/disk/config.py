"""Settings of a shared directory in its `config.json`, and options in its URL.

A quota or an expiry belongs to the store, not to each process that opens it: a process with a
smaller one would delete entries that the others keep. So the URL provides the settings only of a
new store.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from ec_store.config import duration_s, octal, parameters, size_bytes, size_text
from ec_store.disk.files import Folder
from ec_store.errors import StoreUnavailable

FORMAT = 3
"""Format version of the store's folders and files. Changes that older releases cannot read increase
it."""

NAME = "config.json"
LARGEST_BYTES = 4096


class SettingsInvalid(StoreUnavailable):
    """Error of a `config.json` that cannot be used."""


class SettingsLost(SettingsInvalid):
    """Error of a `config.json` that is empty or cut, as a power failure may leave it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Settings that apply to every process that opens the store.

    Attributes:
        max_bytes: quota in bytes; each entry counts as whole blocks of 4 KiB.
        max_share: largest share of the file system that the store may take, from 0 to 1. The
            smaller of this and `max_bytes` is in force.
        ttl: seconds after which an unused entry expires.
        dir_mode: permissions of new folders; new files have the same, but for execution.

    Raises:
        ValueError: a value is out of range.
    """

    max_bytes: int = 64 * 2**30
    max_share: float = 0.5
    ttl: float = 7 * 86400.0
    dir_mode: int = 0o750

    def __post_init__(self) -> None:
        if self.max_bytes <= 0 or self.ttl <= 0:
            raise ValueError("max_bytes and ttl must be greater than 0")
        if not 0 < self.max_share <= 1:
            raise ValueError("max_share must be greater than 0 and at most 1")

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """Parse the content of `config.json`.

        Raises:
            SettingsLost: the content lacks its end.
            SettingsInvalid: the content is invalid, or has another format version.
        """
        if not content.rstrip().endswith(b"}"):
            raise SettingsLost(
                f"{NAME} of the store is empty or cut: rewrite it with `ec-store configure`"
            )
        try:
            values: dict[str, Any] = json.loads(content)
            version = values["format"]
            if version == FORMAT:
                return cls(
                    max_bytes=int(values["max_bytes"]),
                    max_share=float(values["max_share"]),
                    ttl=float(values["ttl_s"]),
                    dir_mode=octal(values["dir_mode"]),
                )
        except (ValueError, TypeError, LookupError, OverflowError) as error:
            raise SettingsInvalid(
                f"{NAME} of the store cannot be read ({error!r}): rewrite it with "
                "`ec-store configure`"
            ) from error
        raise SettingsInvalid(
            f"the store has format version {version}, and this release reads version {FORMAT}: "
            "delete it, or use another directory for this release"
        )

    def to_json(self) -> bytes:
        values = {
            "format": FORMAT,
            "max_bytes": self.max_bytes,
            "max_share": self.max_share,
            "ttl_s": self.ttl,
            "dir_mode": f"{self.dir_mode:o}",
        }
        return json.dumps(values, indent=1).encode() + b"\n"

    def shown_settings(self) -> dict[str, str]:
        """Return each setting in the notation of a store URL."""
        return {
            "max_bytes": size_text(self.max_bytes),
            "max_share": f"{self.max_share:g}",
            "ttl": f"{self.ttl:.15g}s",
            "dir_mode": f"{self.dir_mode:o}",
        }


def ignored_settings(overrides: Mapping[str, Any], settings: StoreSettings) -> list[str]:
    """Return the overrides that differ from the store's settings, as text with both values."""
    mine, theirs = replace(settings, **overrides).shown_settings(), settings.shown_settings()
    return [
        f"{name}={mine[name]} (the store has {theirs[name]})"
        for name, value in overrides.items()
        if value != getattr(settings, name)
    ]


def read_settings(root: Folder) -> StoreSettings | None:
    """Read the settings of a store; None if it has no `config.json`.

    Raises SettingsInvalid, as `StoreSettings.from_json`, and OSError.
    """
    try:
        return StoreSettings.from_json(root.read(NAME, LARGEST_BYTES))
    except FileNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """Location of a shared directory, and how this process uses it.

    Attributes:
        path: absolute path of the directory.
        overrides: settings for a store without `config.json`; those in an existing one
            take precedence.
        max_entry_bytes: size of the largest entry that this process writes or reads.

    Raises:
        ValueError: a value is out of range.
    """

    path: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    max_entry_bytes: int = 4 * 2**30

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Parse a URL such as `file:///path?max_bytes=64GiB&ttl=7d&…`.

        Raises:
            ValueError: the URL has no path, or an unknown or invalid parameter.
        """
        parts = urlsplit(url)
        if parts.scheme != "file" or parts.netloc not in {"", "localhost"} or parts.fragment:
            raise ValueError(f"{url!r} is not file:///path")
        options = parameters(url, _PARAMETERS)
        names = [each.name for each in fields(StoreSettings) if each.name in options]
        overrides = {name: options.pop(name) for name in names}
        path = os.path.normpath(unquote(parts.path)) if parts.path else ""
        return cls(path, overrides, **options)

    def __post_init__(self) -> None:
        if not os.path.isabs(self.path) or "\0" in self.path:  # noqa: PTH117
            raise ValueError(f"{self.path!r} is not an absolute path such as file:///mnt/store")
        if self.max_entry_bytes <= 0:
            raise ValueError("max_entry_bytes must be greater than 0")
        replace(StoreSettings(), **self.overrides)  # checks the values


_PARAMETERS = {
    "max_bytes": size_bytes,
    "max_share": float,
    "ttl": duration_s,
    "dir_mode": octal,
    "max_entry_bytes": size_bytes,
}
