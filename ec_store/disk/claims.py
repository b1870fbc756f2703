"""Claims of a shared directory, as symbolic links.

The link `<digest>` contains the owner of a claim and its lifetime. The links have no target, and no
code follows them. One call creates a whole link, or fails if there is one: that call takes a free
claim. A claim starts when its link was created. A link is never modified: a process that renews,
takes over or removes one locks the folder meanwhile.
"""

import errno
import hashlib
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from ec_store.base import LONGEST_S
from ec_store.disk.files import DIGEST, LISTED, Folder
from ec_store.disk.lock import lock

SLACK_S = 60.0
"""Tolerance in seconds. A claim that starts later was written while the clock was ahead."""


def take_claims(folder: Folder, digests: Sequence[str], owner: bytes, seconds: float) -> list[bool]:
    """Take or renew claims; False for each entry that another owner claims. Raises OSError."""
    ours = _signed(owner)
    claim = f"{seconds:.3f} {ours}"
    taken = {digest: _create(folder, digest, claim) for digest in digests}
    renewable = [
        digest
        for digest, created in taken.items()
        if not created and _holder(folder, digest) in {None, ours}
    ]
    if renewable:
        with _locked(folder):
            for digest in renewable:
                taken[digest] = _replace(folder, digest, ours, claim)
    return [taken[digest] for digest in digests]


def give_back(folder: Folder, digests: Iterable[str], owner: bytes) -> None:
    """Release claims. Those of another owner stay. Raises OSError."""
    ours = _signed(owner)
    with _locked(folder):
        for digest in digests:
            if _holder(folder, digest) == ours:
                os.unlink(digest, dir_fd=folder.fd)


def sweep_claims(folder: Folder) -> None:
    """Remove expired claims. Raises OSError."""
    for digest in folder.names():
        if DIGEST.fullmatch(digest) and _holder(folder, digest) is None:
            with _locked(folder):
                if _holder(folder, digest) is None:
                    folder.remove(digest)


def _replace(folder: Folder, digest: str, ours: str, claim: str) -> bool:
    """Renew a claim, or take one that has ended; False if another owner has taken it meanwhile.

    The folder is locked.
    """
    if _create(folder, digest, claim):  # it was released meanwhile
        return True
    # The link stays as long as the folder is locked.
    if _holder(folder, digest) not in {None, ours}:
        return False
    change = f".{digest}.tmp"
    folder.remove(change)  # a process that died within this change left it
    os.symlink(claim, change, dir_fd=folder.fd)
    os.rename(change, digest, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
    return True


def _create(folder: Folder, digest: str, claim: str) -> bool:
    try:
        os.symlink(claim, digest, dir_fd=folder.fd)
    except FileExistsError:
        return False
    return True


@contextmanager
def _locked(folder: Folder) -> Iterator[None]:
    fd = folder.open(".", LISTED)
    try:
        with lock(fd):
            yield
    finally:
        os.close(fd)


def _holder(folder: Folder, digest: str) -> str | None:
    """Return the holder of a claim, as `_signed` makes it; None without a valid claim."""
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
    return holder if min(lives_s, LONGEST_S) > age_s else None


def _signed(owner: bytes) -> str:
    """Return a hash of the owner: short enough that file systems keep the link in its inode."""
    return hashlib.blake2b(owner, digest_size=16).hexdigest()
