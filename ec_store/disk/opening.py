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
from ec_store.disk.files import NO_ROOM, Folder
from ec_store.disk.housekeeping import Housekeeping
from ec_store.disk.tree import Tree
from ec_store.errors import StoreUnavailable

logger = logging.getLogger("vllm.ec_store")

LOOK_EVERY_S = 1.0
"""Interval in seconds at which the directory is opened again: its path may lead elsewhere, and its
settings may have changed."""


class DiskOpening:
    """Directory that is opened at its first use, and again from time to time."""

    def __init__(
        self, config: DiskConfig, keeper: Housekeeping, *, create: bool, look_every_s: float
    ) -> None:
        """Create the object without opening the directory.

        `keeper` gets the settings. `create` allows this store to create a missing directory, and to
        test a write in `probe`. `look_every_s` is as `LOOK_EVERY_S`.
        """
        self._defaults = keeper.settings = replace(StoreSettings(), **config.overrides)
        self._config = config
        self._keeper = keeper
        self._create = create
        self._look_every_s = look_every_s
        self._opened: Tree | None = None
        self._looked_s = 0.0
        self._ignored: list[str] = []
        self._has_settings = False
        self._unread = False
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
        if tree is None or now - self._looked_s > self._look_every_s:
            self._looked_s = now
            self._opened = None  # if opening fails, the next use retries it
            tree = self._opened = self._open(create=create and self._create)
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

    def reopen_later(self) -> None:
        self._opened = None

    def close(self) -> None:
        """Close the directory; later calls raise StoreUnavailable."""
        self._closed = True
        self._opened = None

    def _open(self, *, create: bool) -> Tree:
        config = self._config
        settings = self._read_or_write_settings(self._root(create=create), create=create)
        tree = Tree(config.path, settings.dir_mode, create=create)
        for folder in tree.folders:
            folder.check_owner(config.overrides.get("dir_mode", 0))
        self._apply_settings(settings)
        if create:
            with suppress(OSError):
                self._keeper.log_limits(tree, config.path)
                if not tree.entries.names():
                    self._keeper.usage(tree)  # creates the ledger: there is no file to count
        return tree

    def _read_or_write_settings(self, root: Folder, *, create: bool) -> StoreSettings:
        """Read the settings. If they cannot be read any more, the present ones stay in force."""
        try:
            settings = read_settings(root)
            if settings is None and create:
                is_new = root.add(NAME, self._defaults.to_json())
                settings = self._defaults if is_new else read_settings(root)
        except (SettingsInvalid, OSError) as error:
            if not self._has_settings and not isinstance(error, SettingsLost):
                raise
            self._log_unread(error)
            return self._keeper.settings
        self._has_settings, self._unread = True, False
        return settings or self._keeper.settings

    def _log_unread(self, error: Exception) -> None:
        if self._unread:  # logged once, not every second
            return
        self._unread = True
        path = self._config.path
        if self._has_settings:
            logger.warning("the store in %s keeps its settings: %s", path, error)
        else:
            # Not rewritten: these may be the defaults of a command, and would apply to every
            # process.
            logger.error(
                "config.json of the store in %s is empty or cut, as after a power failure. This "
                "process uses the settings of its URL, or the defaults: write those of the store "
                "with `ec-store configure`",
                path,
            )

    def _root(self, *, create: bool) -> Folder:
        return Folder.open_path(self._config.path, self._defaults.dir_mode, create=create)

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
