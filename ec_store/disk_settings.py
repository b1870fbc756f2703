"""What a shared directory says of itself: `config.json`, beside its entries.

A quota or an expiry belongs to a store and not to a process that opens it: a process with a smaller
one would delete what the others keep.
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from ec_store.config import octal, size_text
from ec_store.errors import StoreUnavailable
from ec_store.files import Folder

FORMAT = 1
"""Of the folders and files of a store. Raised when another release could not read them."""

NAME = "config.json"
LARGEST_BYTES = 4096


class SettingsInvalid(StoreUnavailable):
    """A store's `config.json` cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """What holds for every process that opens a store.

    Attributes:
        max_bytes: the quota, in whole blocks of 4 KiB for each entry.
        max_share: how much of its file system the store may take, from 0 to 1. The smaller of this
            and `max_bytes` is in force.
        ttl: seconds after which an entry that was not used is forgotten.
        dir_mode, file_mode: permissions of what is created.
    """

    max_bytes: int = 64 * 2**30
    max_share: float = 0.5
    ttl: float = 7 * 86400.0
    dir_mode: int = 0o750
    file_mode: int = 0o640

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ValueError: a value is out of range.
        """
        if self.max_bytes <= 0 or self.ttl <= 0:
            raise ValueError("max_bytes and ttl are greater than 0")
        if not 0 < self.max_share <= 1:
            raise ValueError("max_share is greater than 0, and 1 at most")

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """Read `config.json`.

        Raises:
            SettingsInvalid: it is of another format version, or no such file.
        """
        try:
            held: dict[str, Any] = json.loads(content)
            version = held["format"]
            if version == FORMAT:
                return cls(
                    max_bytes=int(held["max_bytes"]),
                    max_share=float(held["max_share"]),
                    ttl=float(held["ttl_s"]),
                    dir_mode=octal(held["dir_mode"]),
                    file_mode=octal(held["file_mode"]),
                )
        except (ValueError, TypeError, LookupError, OverflowError) as error:
            raise SettingsInvalid(
                f"{NAME} of the store cannot be read ({error!r}): write it anew with "
                "`ec-store configure`"
            ) from error
        raise SettingsInvalid(
            f"the store has format version {version}, and this release reads version {FORMAT}: "
            "use a directory of its own"
        )

    def to_json(self) -> bytes:
        """Return the content of `config.json`."""
        held = {
            "format": FORMAT,
            "max_bytes": self.max_bytes,
            "max_share": self.max_share,
            "ttl_s": self.ttl,
            "dir_mode": f"{self.dir_mode:o}",
            "file_mode": f"{self.file_mode:o}",
        }
        return json.dumps(held, indent=1).encode() + b"\n"

    def shown(self) -> dict[str, str]:
        """Return each setting as a store URL has it."""
        return {
            "max_bytes": size_text(self.max_bytes),
            "max_share": f"{self.max_share:g}",
            "ttl": f"{self.ttl:.15g}s",
            "dir_mode": f"{self.dir_mode:o}",
            "file_mode": f"{self.file_mode:o}",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenSettings:
    """Settings as a URL or a command line gives them; None: not given."""

    max_bytes: int | None = None
    max_share: float | None = None
    ttl: float | None = None
    dir_mode: int | None = None
    file_mode: int | None = None

    def over(self, settings: StoreSettings) -> StoreSettings:
        """Return `settings` with what is given in their place.

        Raises:
            ValueError: a value is out of range.
        """
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return replace(settings, **given)

    def not_in_force(self, settings: StoreSettings) -> list[str]:
        """Return what is given and differs, each with both values, as text."""
        mine, held = self.over(settings).shown(), settings.shown()
        return [
            f"{field.name}={mine[field.name]} (the store has {held[field.name]})"
            for field in fields(self)
            if getattr(self, field.name) not in {None, getattr(settings, field.name)}
        ]


def read_settings(root: Folder) -> StoreSettings | None:
    """Read the settings of a store; None where it has none yet.

    Raises:
        SettingsInvalid: as `StoreSettings.from_json`.
        OSError: they cannot be read.
    """
    try:
        return StoreSettings.from_json(root.read(NAME, LARGEST_BYTES))
    except FileNotFoundError:
        return None


def write_settings(root: Folder, settings: StoreSettings, *, replace: bool) -> bool:
    """Write the settings of a store; False where it has some and `replace` is not set.

    Raises:
        OSError: they cannot be written.
    """
    if replace:
        root.replace(NAME, settings.to_json())
        return True
    return root.add(NAME, settings.to_json())
