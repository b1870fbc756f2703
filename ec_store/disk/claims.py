"""Claims of a shared directory, as symbolic links.

The link `<digest>` contains the owner of a claim and its lifetime. The links have no
target, and no code follows them. One call creates a whole link, or fails if there is one: that call
takes a claim. A claim starts when its link was created. A link is never modified: a renewal or
takeover renames a new link over the old one. Before a process renames over a link, or removes an
expired one, it creates `<digest>.next`, which only one process at a time can, and then reads the
claim once more. File locks are not used: each would keep a file open.
"""

import errno
import hashlib
import math
import os
import time
from collections.abc import Collection, Iterable
from contextlib import suppress

from ec_store.base import LONGEST_CLAIM_S
from ec_store.disk.files import DIGEST, NO_LINKS, Folder

STALE_S = 5.0
"""Seconds after which an unfinished change counts as left by a crash. If two other processes change
the claim at the moment of its removal, both may hold it: the entry is encoded twice."""

SLACK_S = 60.0
"""Tolerance in seconds. A claim that starts later was written while the clock was ahead."""

SURE_S = 1.0
"""Remaining lifetime in seconds below which `give_back` keeps a claim. It could expire between the
check and the removal, which would then remove another owner's claim. A process that is suspended
for longer at this point may cause a second encode."""

_NEXT = ".next"


def take_claims(folder: Folder, digests: Iterable[str], owner: bytes, seconds: float) -> list[bool]:
    """Take or renew claims; False for each entry that another owner claims.

    A claim that another process is changing is not taken. On a file system without symbolic links,
    every claim succeeds: owners do not wait for each other. Raises OSError.
    """
    ours = _signed(owner)
    claim = f"{seconds:.3f} {ours}"
    return [_take(folder, digest, ours, claim) for digest in digests]


def _take(folder: Folder, digest: str, ours: str, claim: str) -> bool:
    try:
        for _ in range(2):  # once more for a claim that ends between the calls
            if folder.link(digest, claim):
                return True
            holder = _holder(folder, digest)
            if holder not in {None, ours}:
                return False
            if _changed(folder, digest, {None, ours}, claim):
                return True
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        return True
    return holder == ours


def give_back(folder: Folder, digest: str, owner: bytes) -> None:
    """Release a claim. A claim of another owner stays. Raises OSError."""
    if _holder(folder, digest, SURE_S) == _signed(owner):
        with suppress(FileNotFoundError):
            os.unlink(digest, dir_fd=folder.fd)


def sweep_claims(folder: Folder) -> None:
    """Remove expired claims, and unfinished changes that crashes left."""
    for digest in {name.removesuffix(_NEXT) for name in folder.names()}:
        if DIGEST.fullmatch(digest) and _holder(folder, digest) is None:
            with suppress(OSError):
                _changed(folder, digest, {None}, None)


def _changed(
    folder: Folder, digest: str, holders: Collection[str | None], claim: str | None
) -> bool:
    """Replace a claim by another one or by none, if one of `holders` holds it.

    Returns:
        False if another owner holds the claim, if it is gone, or if another process is changing it.
    """
    change = digest + _NEXT
    if not folder.link(change, claim or "-"):
        with suppress(FileNotFoundError):
            if not -SLACK_S <= time.time() - folder.stat(change).st_mtime <= STALE_S:
                folder.remove(change)
        return False
    try:
        # An existing link stays until this change ends; a missing one may be created meanwhile.
        if not folder.has(digest) or _holder(folder, digest) not in holders:
            return False
        if claim is None:
            return folder.remove(digest)
        folder.rename(change, digest)
        return True
    finally:
        folder.remove(change)


def _holder(folder: Folder, digest: str, least_s: float = 0.0) -> str | None:
    """Return the holder of a claim, as `_signed` makes it, if more than `least_s` seconds remain.

    None also if there is no link or its text is invalid.
    """
    try:
        # Time before text: if the link is replaced in between, the claim seems older than it is.
        age_s = time.time() - folder.stat(digest).st_mtime
        seconds, _, holder = os.readlink(digest, dir_fd=folder.fd).partition(" ")
        lives_s = float(seconds)
    except (FileNotFoundError, ValueError):
        return None
    except OSError as error:
        if error.errno != errno.EINVAL:  # not a symbolic link
            raise
        return None
    if not holder or age_s < -SLACK_S or math.isnan(lives_s):
        return None
    return holder if min(lives_s, LONGEST_CLAIM_S) - age_s > least_s else None


def _signed(owner: bytes) -> str:
    """Return a hash of the owner: short enough that file systems keep the link in its inode."""
    return hashlib.blake2b(owner, digest_size=16).hexdigest()
