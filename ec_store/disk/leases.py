"""Leases of a shared directory, as empty files.

A lease is the file `<end of the lease>/<digest>`. A future time stamp on the entry is not used.
Only the owner of a file may set one, so two users could not lease each other's entries. A use would
overwrite a lease, and a short lease a long one. A lease file is never modified, so such races
cannot occur.
"""

import math
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import islice

from ec_store.base import LONGEST_S
from ec_store.disk.files import Folder

SWEPT_BY_LEASES = 256
"""Expired leases that the first lease of a new folder removes: the caller waits for it. The others
are left to the removal of leftovers, which needs a writer or an evictor."""


def lease_folder(folder: Folder, seconds: float, now_s: float) -> Folder:
    """Return the folder of leases from now on, for `seconds` and at most an eighth longer.

    Rounding lets leases that end at about the same time share a folder. Raises OSError.
    """
    step = max(1, round(min(seconds, LONGEST_S) / 8))
    name = str(math.ceil((now_s + min(seconds, LONGEST_S)) / step) * step)
    if folder.create_folder(name):
        sweep_leases(folder, now_s, SWEPT_BY_LEASES)
    return folder.folder(name)


def add_lease(folder: Folder, digest: str) -> None:
    """Lease an entry until the end of a `lease_folder`. Raises OSError."""
    with suppress(FileExistsError):
        folder.create(digest)


def leased_digests(folder: Folder, digests: Collection[str], now_s: float) -> set[str]:
    """Return the leased ones of `digests`. Each is looked up: there may be very many leases."""
    names = _live(folder, now_s)
    return {digest for digest in digests if any(folder.has(f"{name}/{digest}") for name in names)}


def count_leased(folder: Folder, now_s: float) -> int:
    """Return the number of entries with leases, which are listed. Raises OSError."""
    leased: set[str] = set()
    for name in _live(folder, now_s):
        with suppress(FileNotFoundError):
            leased.update(folder.folder(name).names())
    return len(leased)


def _live(folder: Folder, now_s: float) -> list[str]:
    latest = now_s + 1.25 * LONGEST_S
    return [name for name, ending in _endings(folder) if now_s <= ending <= latest]


def sweep_leases(folder: Folder, now_s: float, most: int | None = None) -> None:
    """Remove expired leases from the store, `most` of them at most."""
    left = most
    for name, ending in _endings(folder):
        if left == 0:
            break
        if not now_s - 1 <= ending <= now_s + 1.25 * LONGEST_S:
            with suppress(OSError):
                ended = folder.folder(name)
                with ended.scan() as listing:
                    digests = [item.name for item in islice(listing, left)]
                for digest in digests:
                    ended.remove(digest)
                folder.remove_folder(name)
                left = None if left is None else left - len(digests)


def _endings(folder: Folder) -> Iterator[tuple[str, int]]:
    for name in folder.names():
        if name.isascii() and name.isdecimal():
            yield name, int(name)
