"""Opening of a shared directory, with the settings in it and the type of its file system."""

import logging
import os
import secrets
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ec_store.disk.config import (
    NAME,
    DiskConfig,
    SettingsInvalid,
    SettingsLost,
    StoreSettings,
    ignored_settings,
    read_settings,
)
from ec_store.disk.files import NO_ROOM, Folder, Modes
from ec_store.disk.housekeeping import Housekeeping
from ec_store.disk.tree import Tree
from ec_store.errors import StoreUnavailable

logger = logging.getLogger("vllm.ec_store")

LOOK_EVERY_S = 1.0
"""Interval in seconds at which an open store checks that its path still leads to its directory."""


class DiskOpening:
    """Directory that is opened at its first use, and reopened when its path leads elsewhere."""

    def __init__(self, config: DiskConfig, keeper: Housekeeping, *, create: bool) -> None:
        """Create the object without opening the directory.

        `keeper` gets the settings. `create` allows this store to create a missing directory, to
        test a write in `probe`, and to count the entries of a directory without a ledger.
        """
        self._defaults = keeper.settings = replace(StoreSettings(), **config.overrides)
        self._config = config
        self._keeper = keeper
        self._create = create
        self._opened: Tree | None = None
        self._looked_s = 0.0
        self._ignored: list[str] = []
        self._unread = False
        self._counted = False
        self._closed = False

    def tree(self, *, create: bool = False) -> Tree:
        """Return the open directory; `create` creates a missing one if this store may create any.

        Raises:
            OSError: the directory is missing or cannot be used.
            StoreUnavailable: the store is closed, or its settings cannot be used.
        """
        if self._closed:
            raise StoreUnavailable("the store is closed")
        tree, now = self._opened, time.monotonic()
        look = now - self._looked_s > LOOK_EVERY_S
        if look:
            self._looked_s = now
        if tree is None or (look and not tree.current()):
            self._opened = None  # if opening fails, the next use retries it
            tree = self._opened = self._open(create=create and self._create)
        elif look:
            self._follow(tree)
        return tree

    def configure(self, **changes: Any) -> None:
        """Write settings, and reopen the directory. Raises OSError and ValueError."""
        root = self._root(create=True)
        settings = None
        with suppress(SettingsInvalid):
            settings = read_settings(root)
        settings = replace(settings or self._defaults, **changes)
        root.replace(NAME, settings.to_json())
        self._opened = None
        self.tree(create=True)

    def probe(self) -> None:
        """Open the directory, and write to it as a test if this process may create it.

        A full file system is not an error: its entries can still be read.

        Raises:
            OSError: the directory is missing or cannot be written.
            StoreUnavailable: the content read differs from the content written.
        """
        tree = self.tree(create=True)
        if not self._create:
            return
        name, content = f".{secrets.token_hex(8)}.tmp", os.urandom(16)
        try:
            tree.root.replace(name, content)
            if tree.root.read(name, 64) != content:
                raise StoreUnavailable("a test file has other content than was written to it")
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        finally:
            tree.root.remove(name)

    def counted(self, *, create: bool = False) -> Tree:
        """Return the open directory, as `tree`, with a ledger.

        For a lost ledger the files are counted, which takes seconds at 100,000 entries. So
        readers, which may have a deadline, call `tree`. Raises OSError and StoreUnavailable, as it.
        """
        tree = self.tree(create=create)
        if not self._counted:
            self._keeper.restore_ledger(tree)
            self._counted = True
        return tree

    def reopen_later(self) -> None:
        self._opened = None

    def close(self) -> None:
        """Close the directory; later calls raise StoreUnavailable."""
        self._closed = True
        self._opened = None

    def _follow(self, tree: Tree) -> None:
        """Adopt changed settings. If they cannot be read, the present ones stay in force."""
        try:
            self._apply_settings(read_settings(tree.root) or self._keeper.settings)
        except (SettingsInvalid, OSError) as error:
            if not self._unread:  # logged once, not every second
                logger.warning("the store in %s keeps its settings: %s", self._config.path, error)
            self._unread = True
        else:
            self._unread = False

    def _open(self, *, create: bool) -> Tree:
        config = self._config
        root = self._root(create=create)
        settings = self._read_or_write_settings(root, create=create)
        tree = Tree(config.path, Modes(settings.dir_mode, settings.file_mode), create=create)
        for folder in tree.folders:
            folder.check_owner(config.overrides.get("dir_mode", 0))
        self._apply_settings(settings)
        self._counted = not self._create
        if self._create:
            with suppress(OSError):
                self._keeper.log_limits(tree, self._config.path)
                if create and not tree.entries.names():
                    self._keeper.restore_ledger(tree)  # there is no file to count
        return tree

    def _read_or_write_settings(self, root: Folder, *, create: bool) -> StoreSettings:
        with suppress(SettingsLost):
            content = self._defaults.to_json()
            settings = read_settings(root)
            if settings is None and create and not root.add(NAME, content):
                settings = read_settings(root)
            return settings or self._defaults
        # Not rewritten: these may be the defaults of a command, and would apply to every process.
        logger.error(
            "config.json of the store in %s is empty or cut, as after a power failure. This "
            "process uses the settings of its URL, or the defaults: write those of the store with "
            "`ec-store configure`",
            self._config.path,
        )
        return self._defaults

    def _root(self, *, create: bool) -> Folder:
        modes = Modes(self._defaults.dir_mode, self._defaults.file_mode)
        return Folder.open_path(self._config.path, modes, create=create)

    def _apply_settings(self, settings: StoreSettings) -> None:
        """Apply the store's settings, and log the settings of this process that differ."""
        self._keeper.settings = settings
        ignored = ignored_settings(self._config.overrides, settings)
        if ignored and ignored != self._ignored:
            logger.error(
                "the store in %s was opened with %s: the store's own settings are used. Change "
                "them with `ec-store configure`, or the store URL.",
                self._config.path,
                ", ".join(ignored),
            )
        self._ignored = ignored
