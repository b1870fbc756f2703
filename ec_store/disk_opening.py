"""Opens a shared directory, and has a store go by the settings that the directory holds."""

import errno
import logging
import os
import time
from contextlib import suppress

from ec_store.disk_config import DiskConfig
from ec_store.disk_settings import (
    GivenSettings,
    SettingsInvalid,
    StoreSettings,
    read_settings,
    write_settings,
)
from ec_store.errors import StoreUnavailable
from ec_store.files import NO_ROOM, Folder, Modes
from ec_store.housekeeping import Housekeeping
from ec_store.mounts import in_memory
from ec_store.tree import Tree, staging_name

logger = logging.getLogger("vllm.ec_store")

LOOK_EVERY_S = 1.0
"""How often a store looks whether its path still leads to the directory it has open."""


class DiskOpening:
    """A directory that is opened when it is first used, and again when its path leads elsewhere.

    Attributes:
        settings: what holds for every process that opens the store, as last read.
        in_memory: whether the directory that was opened last is on tmpfs.
    """

    def __init__(self, config: DiskConfig, keeper: Housekeeping, *, create: bool) -> None:
        """Open nothing yet.

        Args:
            config: where the directory is, and what it is to hold if it is new.
            keeper: is given the settings, and counts the entries of a directory without a ledger.
            create: whether the directory is made where it is missing.
        """
        self.settings = config.given.over(StoreSettings())
        self.in_memory = False
        self._config = config
        self._keeper = keeper
        self._create = create
        self._opened: Tree | None = None
        self._looked_s = 0.0
        self._ignored: list[str] = []
        self._unread = False
        self._closed = False

    def tree(self, *, create: bool = False) -> Tree:
        """Return the open directory.

        Args:
            create: whether to make it where it is missing, unless this store never does.

        Raises:
            OSError: it is not there, or cannot be used.
            StoreUnavailable: the store is closed, or its settings cannot be used.
        """
        if self._closed:
            raise StoreUnavailable("the store is closed")
        tree, now = self._opened, time.monotonic()
        look = now - self._looked_s > LOOK_EVERY_S
        if look:
            self._looked_s = now
        if tree is None or (look and not tree.current()):
            self._opened = None  # if this fails, the next use tries again
            tree = self._opened = self._open(create=create and self._create)
        elif look:
            self._follow(tree)
        return tree

    def configure(self, given: GivenSettings) -> None:
        """Write settings, and open the directory anew with them. Raises OSError and ValueError."""
        root = self._root(create=True)
        try:
            settings = read_settings(root)
        except SettingsInvalid:
            settings = None
        settings = given.over(settings or self._config.given.over(StoreSettings()))
        write_settings(root, settings, replace=True)
        self._opened = None
        self.tree(create=True)

    def probe(self) -> None:
        """Open the directory, and try to write to it if this process may make it.

        A full file system is no error: it can still be read.

        Raises:
            OSError: the directory is not there, or cannot be written to.
            StoreUnavailable: what is read is not what was written.
        """
        tree = self.tree(create=True)
        if not self._create:
            return
        name, content = staging_name("probe", 0), os.urandom(16)
        try:
            tree.root.replace(name, content)
            if tree.root.read(name, 64) != content:
                raise StoreUnavailable("what was written is not what is read")
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        finally:
            tree.root.remove(name)

    def lost(self, error: OSError) -> None:
        """After an error that says more than that an entry is missing, open the directory anew."""
        if error.errno in {errno.ESTALE, errno.EBADF}:
            self.forget()

    def forget(self) -> None:
        """Open the directory anew at its next use."""
        self._opened = None

    def close(self) -> None:
        """Close the directory; later calls raise StoreUnavailable."""
        self._closed = True
        self._opened = None

    def _follow(self, tree: Tree) -> None:
        """Adopt settings that were changed. Those that cannot be read change nothing."""
        try:
            self._adopt(read_settings(tree.root) or self.settings)
        except (SettingsInvalid, OSError) as error:
            if not self._unread:  # else each second
                logger.warning("the store in %s keeps its settings: %s", self._config.path, error)
            self._unread = True
        else:
            self._unread = False

    def _open(self, *, create: bool) -> Tree:
        """Open the directory, and learn what holds for it, or say so where it is new."""
        config = self._config
        root = self._root(create=create)
        held = read_settings(root)
        if held is None:
            held = config.given.over(StoreSettings())
            if create and not write_settings(root, held, replace=False):
                held = read_settings(root) or held
        tree = Tree(config.path, Modes(held.dir_mode, held.file_mode), create=create)
        self.in_memory = in_memory(tree.entries.fd)
        for folder in tree.folders:
            folder.check_owner(config.given.dir_mode or 0)
        self._adopt(held)
        if self._create:
            self._begin(tree)
        return tree

    def _begin(self, tree: Tree) -> None:
        """Count entries that no ledger knows of, and log how much space is left to others.

        A process that may not write goes on without: it can read.
        """
        with suppress(OSError):
            if self._keeper.ledger.empty(tree.usage):
                self._keeper.sweep(tree, every_s=0.0)
            self._keeper.log_limits(tree, self._config.path)

    def _root(self, *, create: bool) -> Folder:
        config = self._config
        if config.require_mount and not config.mounted:
            raise StoreUnavailable(f"nothing is mounted at {config.path}, and it has require_mount")
        made = config.given.over(StoreSettings())
        modes = Modes(made.dir_mode, made.file_mode)
        return Folder.at(config.path, modes) if create else Folder.there(config.path, modes)

    def _adopt(self, settings: StoreSettings) -> None:
        """Go by what the store says, and log what this process was given and does not use."""
        self.settings = self._keeper.settings = settings
        ignored = self._config.given.not_in_force(settings)
        if ignored and ignored != self._ignored:
            logger.error(
                "the store in %s was opened with %s: the store's own settings are used. Change "
                "them with `ec-store configure`, or the store URL.",
                self._config.path,
                ", ".join(ignored),
            )
        self._ignored = ignored
