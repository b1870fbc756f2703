"""Leases as files: `<end of the lease>/<digest>`.

The entry's own time stamp, set ahead, would not do. Only the owner of a file may set it, so two
users could not lease each other's entries. A use would overwrite a lease, and a short lease a long
one. A lease file is never modified, so such races cannot occur.
"""

import math
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress

from ec_store.files import Folder

LONGEST_S = 3600.0
"""Upper bound in seconds of a lease, both when it is written and when it is read."""


class Leases:
    """Leases of one store, below one folder."""

    def add(self, folder: Folder, digests: Sequence[str], seconds: float, now_s: float) -> None:
        """Lease entries from now on, for `seconds` and at most an eighth longer.

        Rounding lets leases that end at about the same time share a folder.
        """
        step = max(1, round(min(seconds, LONGEST_S) / 8))
        end = math.ceil((now_s + min(seconds, LONGEST_S)) / step) * step
        if folder.made(str(end)):
            self.sweep(folder, now_s)
        ending = folder.folder(str(end))
        for digest in digests:
            with suppress(FileExistsError):
                os.close(ending.create(digest))

    def leased(self, folder: Folder, digests: Collection[str], now_s: float) -> set[str]:
        """Return the leased ones of `digests`. Each is looked up: there may be very many leases.

        On NFS the listing of the ends may be some seconds old. A lease counts as a use, so an entry
        that was leased that recently is evicted last.
        """
        names = [
            name for name, ending in _endings(folder) if now_s <= ending <= now_s + 1.25 * LONGEST_S
        ]
        return {
            digest for digest in digests if any(folder.has(f"{name}/{digest}") for name in names)
        }

    def sweep(self, folder: Folder, now_s: float) -> None:
        """Remove expired leases from the store."""
        for name, ending in _endings(folder):
            if not now_s - 1 <= ending <= now_s + 1.25 * LONGEST_S:
                with suppress(OSError):
                    ended = folder.folder(name)
                    for digest in ended.names():
                        ended.remove(digest)
                    folder.remove_folder(name)


def _endings(folder: Folder) -> Iterator[tuple[str, int]]:
    for name in folder.names():
        if name.isascii() and name.isdecimal():
            yield name, int(name)
