"""The mount table of this machine."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of the mount table.

    Attributes:
        path: where the file system is mounted.
        kind: its type, as `nfs4`.
        options: as `{"vers": "4.2", "hard": ""}`.
    """

    path: PurePosixPath
    kind: str
    options: dict[str, str]


def mount_of(path: PurePosixPath, table: Iterable[str]) -> Mount | None:
    """Return the mount that a path is on; None where the table has none.

    Args:
        path: absolute, without links.
        table: lines of `/proc/mounts` (proc_pid_mounts(5), fstab(5)). Of mounts at one place the
            last one counts.
    """
    found: Mount | None = None
    for line in table:
        match line.split(" "):
            case [_, place, kind, options, *_]:
                mount = Mount(PurePosixPath(_unescaped(place)), kind, _options(options))
                nearer = found is None or len(mount.path.parts) >= len(found.path.parts)
                if path.is_relative_to(mount.path) and nearer:
                    found = mount
            case _:
                pass
    return found


def _options(text: str) -> dict[str, str]:
    pairs = (option.partition("=") for option in text.split(","))
    return {name: value for name, _, value in pairs}


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)
