"""Options in the URL of a shared directory."""

import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, Self
from urllib.parse import unquote, urlsplit

from ec_store.config import duration_s, octal, parameters, size_bytes
from ec_store.disk_settings import GivenSettings, StoreSettings


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """Location of a shared directory, and how this process uses it.

    Attributes:
        path: absolute path of the directory.
        given: settings for a store without `config.json`. The settings in an existing `config.json`
            take precedence.
        durability: `fsync` if an entry has to survive a power cut once `put` has returned.
        max_entry_bytes: size of the largest entry that this process writes or reads.
        require_mount: whether the store is unavailable unless a file system is mounted at the
            directory or above it. Without its mount, `/mnt/ec` is a directory of the root disk.
    """

    path: str
    given: GivenSettings = field(default_factory=GivenSettings)
    durability: Literal["none", "fsync"] = "none"
    max_entry_bytes: int = 4 * 2**30
    require_mount: bool = False

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Parse a URL such as `file:///path?max_bytes=64GiB&ttl=7d&…`.

        Raises:
            ValueError: the URL has no path, or an unknown or invalid parameter.
        """
        parts = urlsplit(url)
        if parts.scheme != "file" or parts.netloc not in {"", "localhost"} or parts.fragment:
            raise ValueError(f"{url!r} is not file:///path")
        said = parameters(url, _PARAMETERS)
        given = {each.name: said.pop(each.name, None) for each in fields(GivenSettings)}
        config = cls(os.path.normpath(unquote(parts.path)) if parts.path else "")
        return replace(config, given=GivenSettings(**given), **said)

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: a value is out of range.
        """
        if not os.path.isabs(self.path) or "\0" in self.path:  # noqa: PTH117
            raise ValueError(f"{self.path!r} is not an absolute path such as file:///mnt/store")
        if self.max_entry_bytes <= 0:
            raise ValueError("max_entry_bytes must be greater than 0")
        self.given.over(StoreSettings())

    @property
    def mounted(self) -> bool:
        """Return whether a file system other than the root's is mounted at the path or above it."""
        path = Path(self.path).resolve()
        return any(folder.is_mount() for folder in (path, *path.parents) if folder.name)


def _durability(text: str) -> str:
    if text not in {"none", "fsync"}:
        raise ValueError(f"{text!r} is not none or fsync")
    return text


def _switch(text: str) -> bool:
    if text not in {"0", "1"}:
        raise ValueError(f"{text!r} is not 0 or 1")
    return text == "1"


_PARAMETERS = {
    "max_bytes": size_bytes,
    "max_share": float,
    "ttl": duration_s,
    "durability": _durability,
    "dir_mode": octal,
    "file_mode": octal,
    "max_entry_bytes": size_bytes,
    "require_mount": _switch,
}
