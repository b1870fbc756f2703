"""Listing of a shared directory, for `ec-store ls`, `verify` and `purge`."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from ec_store.base import Listed
from ec_store.disk.entry_files import EntryFiles, load_header
from ec_store.disk.files import READ, Folder
from ec_store.disk.tree import Found, Tree
from ec_store.entry import MAX_HEADER_BYTES
from ec_store.errors import CorruptEntry, OtherFormat

GONE = frozenset({errno.ENOENT, errno.ELOOP, errno.ESTALE})
"""Errors of an entry that was removed meanwhile, or of a symbolic link, which is no entry."""


def list_entries(tree: Tree, files: EntryFiles | None = None) -> Iterator[Listed]:
    """Yield every entry; read it whole if `files` is given.

    Raises:
        OSError: after all other entries, if some could not be read.
    """
    unread: list[OSError] = []
    for found in tree.scan(unread):
        try:
            fd = found.folder.open(found.digest, READ)
            try:
                row = _listed(found, fd, files)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno not in GONE:
                unread.append(error)
            continue
        yield row
    if unread:
        raise unread[0]


def _listed(found: Found, fd: int, files: EntryFiles | None) -> Listed:
    info, problem, skipped = None, None, None
    try:
        info = load_header(found.digest, fd, found.size_bytes)
        if files:
            files.load(info.key, fd, found.size_bytes)
    except OtherFormat as error:
        skipped = str(error)
    except CorruptEntry as error:
        problem = str(error)
    return Listed(found.digest, info, found.size_bytes, found.used_s, problem, skipped)


def valid_registrations(folder: Folder) -> Iterator[tuple[str, str, str]]:
    """Yield file name, model and namespace of each valid registration."""
    for name in folder.names():
        if name.endswith(".json"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                read_back: Any = json.loads(folder.read(name, MAX_HEADER_BYTES))
                yield name, str(read_back["model"]), str(read_back["namespace"])
