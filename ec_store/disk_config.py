"""What the URL of a shared directory says."""

import os
from dataclasses import dataclass, replace
from typing import Literal, Self
from urllib.parse import unquote, urlsplit

from ec_store.config import duration_s, parameters, size_bytes


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """Where a shared directory is and what it may hold.

    Attributes:
        path: the directory; made where it is missing.
        max_bytes: the quota, headers included.
        ttl: seconds after which an entry that was not used is forgotten.
        durability: `fsync` to have an entry survive a power cut once `put` has returned.
        dir_mode, file_mode: permissions. Users that share a store need the same group, and
            2770 and 0660.
        max_entry_bytes: the largest entry that is written or read.

    Raises:
        ValueError: a value is out of range.
    """

    path: str
    max_bytes: int = 64 * 2**30
    ttl: float = 7 * 86400.0
    durability: Literal["none", "fsync"] = "none"
    dir_mode: int = 0o750
    file_mode: int = 0o640
    max_entry_bytes: int = 4 * 2**30

    @classmethod
    def from_url(cls, url: str) -> Self:
        """What a URL says, `file:///path?max_bytes=64GiB&ttl=7d&…`.

        Raises:
            ValueError: it has an unknown or wrong parameter, or no path.
        """
        parts = urlsplit(url)
        if parts.scheme != "file" or parts.netloc not in {"", "localhost"} or parts.fragment:
            raise ValueError(f"{url!r} is not file:///path")
        config = cls(os.path.normpath(unquote(parts.path)) if parts.path else "")
        return replace(config, **parameters(url, _PARAMETERS))

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if not os.path.isabs(self.path) or "\0" in self.path:  # noqa: PTH117
            raise ValueError(f"{self.path!r} is no absolute path: file:///mnt/store")
        if self.max_bytes <= 0 or self.max_entry_bytes <= 0 or self.ttl <= 0:
            raise ValueError("max_bytes, max_entry_bytes and ttl are greater than 0")


def _durability(text: str) -> str:
    if text not in {"none", "fsync"}:
        raise ValueError(f"{text!r} is not none or fsync")
    return text


def _mode(text: str) -> int:
    mode = int(text, 8)
    if not 0 <= mode <= 0o7777:  # noqa: PLR2004 - all the bits there are
        raise ValueError(f"{text!r} is not a mode such as 0750")
    return mode


_PARAMETERS = {
    "max_bytes": size_bytes,
    "ttl": duration_s,
    "durability": _durability,
    "dir_mode": _mode,
    "file_mode": _mode,
    "max_entry_bytes": size_bytes,
}
