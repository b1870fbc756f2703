"""Claims as symbolic links: `<digest>` says who claims an entry, and for how long.

They lead nowhere, and nobody follows them. A link is there whole or not at all, and one call makes
it where there is none: that is a claim taken. It begins when its link was made, by the clock of
whatever keeps the files. The link never changes: a claim that is renewed or taken over is a new
link, renamed over the old one. Who does that, or removes one that has ended, has made
`<digest>.next` before, which one at a time can, and looks at it once more. No locks of the
system's: not all that is mounted has them, and over NFS they may outlive their holder.
"""

import errno
import hashlib
import math
import os
import random
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import NamedTuple

from ec_store.base import LONGEST_CLAIM_S
from ec_store.files import DIGEST, NO_LINKS, Folder

STALE_S = 5.0
"""A change that takes longer was left by a crash. Where a second and a third process make one just
when it is removed as such, two may hold a claim: an entry is encoded twice."""

WAIT_S = 1.0
"""How long one call waits for changes that others make, however many entries it is about."""

SLACK_S = 60.0
"""A claim that begins later than this from now was written when the store's clock was ahead."""

SURE_S = 1.0
"""A claim that has less to live is not given back: between a look and its removal it could end, and
another's would be removed. Who is held up for longer there may cause a second encode."""

_NEXT = ".next"

Clock = Callable[[], float]


class _Claim(NamedTuple):
    """What a link says: whose claim it is, as `_signed`, and how long it lives from now."""

    holder: str
    left_s: float


class Claims:
    """The claims of a store, in one folder. Every method raises OSError where it cannot write."""

    def take(  # noqa: PLR0913 - what a claim is made of
        self,
        folder: Folder,
        digests: Iterable[str],
        owner: bytes,
        seconds: float,
        now: Clock,
        *,
        wait: bool = True,
    ) -> list[bool]:
        """Claim entries, or go on claiming them; False for each that another claims.

        Where there are no links there are no claims either, and nobody waits for anybody. Without
        `wait` a claim that another process changes at the moment is not taken.
        """
        ours, deadline_s = _signed(owner), time.monotonic() + (WAIT_S if wait else 0.0)
        claim = f"{seconds:.3f} {ours}"
        return [self._take(folder, digest, ours, claim, deadline_s, now) for digest in digests]

    @staticmethod
    def _take(  # noqa: PLR0913, PLR0917
        folder: Folder, digest: str, ours: str, claim: str, deadline_s: float, now: Clock
    ) -> bool:
        try:
            while not folder.link(digest, claim):
                holder = _holder(folder, digest, now())
                if holder not in {None, ours}:
                    return False
                if _changed(folder, digest, {None, ours}, claim, now):
                    return True
                if time.monotonic() >= deadline_s:
                    return holder == ours
                time.sleep(random.uniform(0.001, 0.005))  # noqa: S311
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
        return True

    def give_back(self, folder: Folder, digest: str, owner: bytes, now: Clock) -> None:
        """Claim an entry no more. What another claims is left alone."""
        claim = _read(folder, digest, now())
        if claim is not None and claim.holder == _signed(owner) and claim.left_s > SURE_S:
            with suppress(FileNotFoundError):
                os.unlink(digest, dir_fd=folder.fd)

    def sweep(self, folder: Folder, now: Clock) -> None:
        """Remove claims that ended, and changes that were never made."""
        for digest in {name.removesuffix(_NEXT) for name in folder.names()}:
            if DIGEST.fullmatch(digest) and _holder(folder, digest, now()) is None:
                with suppress(OSError):
                    _changed(folder, digest, {None}, None, now)


def _changed(
    folder: Folder, digest: str, holders: Collection[str | None], claim: str | None, now: Clock
) -> bool:
    """Put a claim in the place of the one that is there, or nothing, if one of `holders` holds it.

    Returns:
        False where another holds it, it is gone, or another process changes it.
    """
    change = digest + _NEXT
    if not folder.link(change, claim or "-"):
        with suppress(FileNotFoundError):
            if not -SLACK_S <= now() - folder.stat(change).st_mtime <= STALE_S:
                folder.remove(change)
        return False
    try:
        # What is there stays until this change is over; what is not, may be claimed meanwhile.
        if not folder.has(digest) or _holder(folder, digest, now()) not in holders:
            return False
        if claim is None:
            return folder.remove(digest)
        folder.rename(change, digest)
        return True
    finally:
        folder.remove(change)


def _holder(folder: Folder, digest: str, now_s: float) -> str | None:
    """Who claims an entry now."""
    claim = _read(folder, digest, now_s)
    return claim.holder if claim is not None and claim.left_s > 0 else None


def _read(folder: Folder, digest: str, now_s: float) -> _Claim | None:
    """The claim to an entry; None where there is none, or what is there says nothing."""
    try:
        # In this order: one that is put in its place meanwhile seems to be older than it is.
        age_s = now_s - folder.stat(digest).st_mtime
        seconds, _, holder = os.readlink(digest, dir_fd=folder.fd).partition(" ")
        lives_s = float(seconds)
    except (FileNotFoundError, ValueError):
        return None
    except OSError as error:
        if error.errno != errno.EINVAL:  # no link
            raise
        return None
    if not holder or age_s < -SLACK_S or math.isnan(lives_s):
        return None
    return _Claim(holder, min(lives_s, LONGEST_CLAIM_S) - age_s)


def _signed(owner: bytes) -> str:
    """What stands for an owner: short enough for file systems to keep a link in its inode."""
    return hashlib.blake2b(owner, digest_size=16).hexdigest()
