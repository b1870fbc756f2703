"""What the URL of a shared directory says."""

import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, Self
from urllib.parse import unquote, urlsplit

from ec_store.config import duration_s, octal, parameters, size_bytes
from ec_store.disk_settings import GivenSettings, StoreSettings


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """Where a shared directory is, and how this process uses it.

    Attributes:
        path: the directory.
        given: settings for a store that is made, or that has none yet. Those of a store that has
            some win.
        durability: `fsync` to have an entry survive a power cut once `put` has returned.
        max_entry_bytes: the largest entry that is written or read.
        require_mount: whether the directory has to be on a file system that is mounted at it or
            above it: without its mount, `/mnt/ec` is a folder of the root disk.
    """

    path: str
    given: GivenSettings = field(default_factory=GivenSettings)
    durability: Literal["none", "fsync"] = "none"
    max_entry_bytes: int = 4 * 2**30
    require_mount: bool = False

    @classmethod
    def from_url(cls, url: str) -> Self:
        """What a URL says, `file:///path?max_bytes=64GiB&ttl=7d&…`.

        Raises:
            ValueError: it has an unknown or wrong parameter, or no path.
        """
        parts = urlsplit(url)
        if parts.scheme != "file" or parts.netloc not in {"", "localhost"} or parts.fragment:
            raise ValueError(f"{url!r} is not file:///path")
        said = parameters(url, _PARAMETERS)
        given = {each.name: said.pop(each.name, None) for each in fields(GivenSettings)}
        config = cls(os.path.normpath(unquote(parts.path)) if parts.path else "")
        return replace(config, given=GivenSettings(**given), **said)

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ValueError: a value is out of range.
        """
        if not os.path.isabs(self.path) or "\0" in self.path:  # noqa: PTH117
            raise ValueError(f"{self.path!r} is no absolute path: file:///mnt/store")
        if self.max_entry_bytes <= 0:
            raise ValueError("max_entry_bytes is greater than 0")
        self.given.over(StoreSettings())

    @property
    def mounted(self) -> bool:
        """Whether a file system is mounted at the directory or above it, below the root's."""
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
