"""Claims as files: `<digest>` says who claims an entry, and for how long.

A claim begins when its file was written, by the clock of whatever keeps the files. The file never
changes: a claim that is renewed or taken over is a new file, renamed over the old one. Who changes
a claim has created `<digest>.next` before, which one at a time can, and looks at it once more. No
locks of the system's: not all that is mounted has them, and over NFS they may outlive their holder.
"""

import os
import random
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from ec_store.base import LONGEST_CLAIM_S
from ec_store.files import DIGEST, READ, Folder, write

STALE_S = 5.0
"""A change that takes longer was left by a crash. Where a second and a third process make one just
when it is removed as such, two may hold a claim: an entry is encoded twice."""

WAIT_S = 1.0
"""How long somebody else's change is waited for."""

SLACK_S = 60.0
"""A claim that begins later than this from now was written when the store's clock was ahead."""

_NEXT = ".next"
_READ_BYTES = 512

Clock = Callable[[], float]


class Claims:
    """The claims of a store, in one folder. Every method raises OSError where it cannot write."""

    def take(self, folder: Folder, digest: str, owner: bytes, seconds: float, now: Clock) -> bool:
        """Claim an entry, or go on claiming it; False where another does."""
        content = b"%.3f %b" % (seconds, owner)
        taken = _change(folder, digest, {None, owner}, content, now)
        return _holder(folder, digest, now()) == owner if taken is None else taken

    def give_back(self, folder: Folder, digest: str, owner: bytes, now: Clock) -> None:
        """Claim an entry no more. What another claims is left alone."""
        _change(folder, digest, {owner}, None, now)

    def sweep(self, folder: Folder, now: Clock) -> None:
        """Remove claims that ended, and changes that were never made."""
        for digest in {name.removesuffix(_NEXT) for name in folder.names()}:
            if DIGEST.fullmatch(digest):
                with suppress(OSError):
                    _change(folder, digest, {None}, None, now)


def _change(
    folder: Folder,
    digest: str,
    holders: Collection[bytes | None],
    content: bytes | None,
    now: Clock,
) -> bool | None:
    """Write a claim, or remove it where there is no content, if one of `holders` holds it.

    Returns:
        False where another holds it; None where somebody else's change did not end in time.
    """

    def allowed() -> bool:
        return _holder(folder, digest, now()) in holders

    deadline = time.monotonic() + WAIT_S
    while allowed():
        fd = _begun(folder, digest + _NEXT, now())
        if fd is not None:
            return _changed(folder, digest, fd, content, allowed)
        if time.monotonic() > deadline:
            return None
        time.sleep(random.uniform(0.001, 0.005))  # noqa: S311
    return False


def _begun(folder: Folder, name: str, now_s: float) -> int | None:
    """The file of a change that nobody else can make meanwhile; None where somebody is at it."""
    try:
        return folder.create(name)
    except FileExistsError:
        with suppress(FileNotFoundError):
            if not -SLACK_S <= now_s - folder.stat(name).st_mtime <= STALE_S:
                folder.remove(name)
    return None


def _changed(
    folder: Folder, digest: str, fd: int, content: bytes | None, allowed: Callable[[], bool]
) -> bool:
    """Make a change that was begun, unless it is not allowed any more."""
    renamed = False
    try:
        try:
            write(fd, [memoryview(content or b"")])
        finally:
            os.close(fd)  # before it gets its name: over NFS others see what was closed
        if not allowed():
            return False
        if content:
            folder.rename(digest + _NEXT, digest)
            renamed = True
        else:
            folder.remove(digest)
        return True
    finally:
        if not renamed:
            folder.remove(digest + _NEXT)


def _holder(folder: Folder, digest: str, now_s: float) -> bytes | None:
    """Who claims an entry now."""
    try:
        fd = os.open(digest, READ, dir_fd=folder.fd)
    except FileNotFoundError:
        return None
    try:
        age_s = now_s - os.fstat(fd).st_mtime
        seconds, _, owner = os.read(fd, _READ_BYTES).partition(b" ")
    finally:
        os.close(fd)
    with suppress(ValueError):
        if owner and -SLACK_S <= age_s < min(float(seconds), LONGEST_CLAIM_S):
            return owner
    return None
